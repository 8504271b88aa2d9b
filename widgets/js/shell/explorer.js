// The explorer as a whole: one model, one selection, panels in tabs. Python computes; this draws, and sends back what was asked.

import { find, h, unique } from "../parts/dom.js";
import { markPass, passes } from "../passes/panel.js";
import { details } from "../tables/details.js";
import { Lift } from "../tables/lift.js";
import { VerdictBar } from "../verdict/panel.js";
import { Background } from "./background.js";
import { Connection, hidden } from "./connection.js";
import { History } from "./history.js";
import { shortcut, showHelp, Trail } from "./keys.js";
import { PANELS, STYLES } from "./panels.js";
import { Search } from "./search.js";

export class Explorer {
  /** @param {Model} model @param {HTMLElement} host */
  constructor(model, host) {
    this.model = model;
    this.connection = new Connection(model);
    /** @type {Set<string> | null} */
    this.matches = null;
    this.trail = new Trail();
    this.history = new History();
    /** What was drawn last. @type {Payload | null} */
    this.answered = null;
    /** The numbers of the payload that comes next, in the one that is there. @type {Payload & { whole: Payload } | null} */
    this.ahead = null;
    this.search = new Search(() => this.payload, (matches) => this.showMatches(matches), (value) => this.select(value));
    /** The status that the panels were drawn with. */
    this.shown = model.get("status");
    /** @type {Open} */
    this.open = { passes: new Set(), kernels: new Set(), typed: {}, pass: "" };
    /** @type {Act} */
    this.act = {
      configure: (changes) => this.ask("passes", { type: "configure", changes }),
      measure: () => this.ask("timing", { type: "measure" }),
      select: (value) => this.select(value),
      showPass: (name) => this.showPass(name),
      showAlone: (name) => this.connection.send({ type: "show_pass", pass: name }),
      openTab: (id) => this.goToTab(id),
      openKernel: (name) => this.openKernel(name),
      openFinding: (key) => this.openFinding(key),
      search: (query) => this.search.run(query),
      ask: (panel, message) => this.ask(panel, message),
      // Names that were refused are in no history: they go first.
      undo: () => ("freeze" in this.open.typed ? (delete this.open.typed.freeze, this.drawSide()) : this.again(this.history.undo())),
      redo: () => this.again(this.history.redo()),
      history: this.history,
      get live() {
        return model.get("live");
      },
      holds: (changes) => model.holds?.(changes) ?? model.get("live"),
    };
    /** Made when first opened. @type {Map<string, Panel>} */
    this.panels = new Map();
    /** Those that have missed a change while another one was shown. @type {Set<string>} */
    this.outdated = new Set();
    this.tab = PANELS.find(({ id }) => id === model.get("tab"))?.id ?? PANELS[0].id;
    /** Whether the details are of the pass, where a value is selected too: of what was asked for last. */
    this.showsPass = false;
    this.background = new Background(() => this.act.measure());
    this.verdict = new VerdictBar(this.act, (isOn) => {
      this.background.isOn = isOn;
      this.background.consider(this.view);
    });
    this.connection.element = this.verdict.lost;
    this.slots = {
      passes: h("div", { class: "tf-side", tabindex: "-1" }),
      tabs: h("div", { class: "tf-tabs", role: "tablist", "aria-label": "Panels" }),
      body: h("div", { class: "tf-tab-body", role: "tabpanel", id: unique("tf-panel") }),
      details: h("div", { class: "tf-aside", tabindex: "-1" }),
    };
    this.verdict.know.append(this.search.element);
    const bar = h("div", { class: "tf-bar-top" }, this.slots.tabs);
    const main = h("div", { class: "tf-main" }, bar, this.slots.body);
    const columns = h("div", { class: "tf-columns" }, this.slots.passes, main, this.slots.details);
    this.lift = new Lift(this.slots.details, columns);
    this.root = h(
      "div",
      // With the focus here after a click between the controls, keys still reach the view.
      { class: "tf", tabindex: "-1", "data-testid": "tf-root" },
      h("style", null, STYLES, hidden(model.get("key"))),
      h("div", { class: "tf-frame" }, this.verdict.element, columns),
    );
    this.root.addEventListener("pointerdown", ({ clientX: x, clientY: y }) => (this.lift.at = { x, y }), { capture: true });
    // JupyterLab's shortcuts would take single letters and arrows away from the controls in here.
    this.root.addEventListener("keydown", (event) => {
      event.stopPropagation();
      this.onKey(event);
    });
    host.append(this.root);
  }

  /** With the numbers of the next one, where they are there. */
  get payload() {
    const whole = this.model.get("payload");
    return this.ahead?.whole === whole ? this.ahead : whole;
  }

  /** @returns {View} */
  get view() {
    const { model, matches, payload } = this;
    return { payload, status: model.get("status"), selected: model.get("selected"), live: model.get("live"), timeline: model.get("timeline"), step: model.get("step"), board: model.get("board"), matches, pass: this.open.pass };
  }

  /** The payload with what was chosen since: a switch moves at once, its numbers follow. @returns {Payload} */
  get chosen() {
    const { payload } = this;
    return { ...payload, config: { ...payload.config, ...this.history.pending } };
  }

  /** Send a message, and show at once that `panel` waits: the kernel may be running a cell. @param {Exclude<Status["busy"], "">} panel @param {Message} message */
  ask(panel, message) {
    this.history.note(message, this.chosen);
    this.send(panel, message);
  }

  /** @param {Exclude<Status["busy"], "">} panel @param {Message} message */
  send(panel, message) {
    this.background.stop();
    this.root.dataset.busy = panel;
    if (!this.connection.send(message)) {
      this.root.dataset.busy = "";
      this.history.giveUp();
    }
    this.drawChoices();
  }

  /** @param {any} message see `Message` @param {DataView[]} buffers */
  receive(message, buffers) {
    if (message.type === "file") return this.verdict.menu.received(message, buffers[0]);
    if (message.type === "answered") return this.answer(message.to);
    const { payload } = this;
    const { numbers } = message;
    this.ahead = numbers && { ...payload, ...numbers, memory: { ...payload.memory, ...numbers.memory }, whole: this.model.get("payload") };
    this.drawAll();
  }

  /** The kernel is done with a message, whatever came of it. @param {Message} message */
  answer(message) {
    if (!this.history.answer(message)) return;
    this.drawVerdict();
    this.drawChoices();
  }

  /** Take a choice back, or make it again. @param {Message | null} message */
  again(message) {
    if (message) this.send("passes", message);
  }

  destroy() {
    this.background.stop();
    this.connection.destroy();
    this.lift.destroy();
    for (const panel of this.panels.values()) panel.destroy?.();
  }

  // --- drawing -------------------------------------------------------------------------------------------------------

  drawAll() {
    // A payload is the answer to the last choice; a timeline is none.
    if (this.view.payload !== this.answered) this.history.accept(this.view.payload);
    if (!this.view.live) {
      this.ahead = null;
      this.history.giveUp();
    }
    this.answered = this.view.payload;
    this.connection.draw();
    this.drawVerdict();
    this.drawSide();
    this.drawTabs();
    for (const id of this.panels.keys()) this.outdated.add(id);
    this.search.refresh();
    this.drawPanel();
    this.drawDetails();
    this.root.dataset.ready = "1";
  }

  /** Progress touches the verdict bar only, so that nobody's typing in the other panels is lost. */
  drawStatus() {
    const { status, live } = this.view;
    // A page says at the panel of what it lacks that it cannot.
    const isSame = JSON.stringify(status.error) === JSON.stringify(this.shown.error);
    const isRefused = status.error !== null && (!live || (status.error.panel === "passes" && !isSame)) && this.history.refuse();
    // Every message brings an error of its own, also where it is the same one.
    const isProgress = status.busy === this.shown.busy && isSame;
    this.drawVerdict();
    if (isProgress && !isRefused) return;
    this.drawSide();
    if (status.error?.panel === "timing") this.openTab("timing");
    for (const id of this.panels.keys()) this.outdated.add(id);
    this.drawPanel();
    this.drawDetails();
  }

  /** With what is known anew of the payload. */
  drawVerdict() {
    Object.assign(this.model.get("payload"), this.model.get("anew"));
    this.root.dataset.busy = Object.keys(this.history.pending).length > 0 ? "passes" : this.view.status.busy;
    this.verdict.draw(this.view);
    this.background.consider(this.view);
  }

  drawSide() {
    const { status } = this.view;
    this.shown = status;
    this.swap(this.slots.passes, passes(this.chosen, status, this.history.pending, this.open, this.act));
  }

  /** What can be chosen, as it was chosen last. */
  drawChoices() {
    this.drawSide();
    this.drawDetails();
  }

  drawTabs() {
    const { payload } = this;
    const tabs = PANELS.map(({ id, label, count }) =>
      h(
        "button",
        {
          role: "tab",
          "aria-selected": String(id === this.tab),
          "aria-controls": this.slots.body.id,
          tabindex: id === this.tab ? "0" : "-1",
          onclick: () => this.openTab(id),
          onkeydown: (/** @type {KeyboardEvent} */ event) => this.onTabKey(event),
          "data-testid": `tf-tab-${id}`,
        },
        label(payload),
        count && " ",
        count && h("span", { class: "tf-count" }, count(payload) || ""),
      ),
    );
    this.swap(this.slots.tabs, ...tabs);
  }

  /** Show the open tab's panel, made and brought up to date where that is needed. */
  drawPanel() {
    const spec = PANELS.find(({ id }) => id === this.tab) ?? PANELS[0];
    let panel = this.panels.get(spec.id);
    if (!panel) {
      panel = spec.make(this.act, this.open);
      this.panels.set(spec.id, panel);
      this.outdated.add(spec.id);
    }
    if (this.slots.body.firstChild !== panel.element) this.slots.body.replaceChildren(panel.element);
    const isLate = this.payload.late?.includes(spec.id);
    this.slots.body.ariaBusy = String(!!isLate);
    if (isLate) return;
    if (this.outdated.delete(spec.id)) panel.draw(this.view);
    panel.mark(this.view);
  }

  /** What was tried while something else was shown comes when its tab is opened. */
  drawBoard() {
    this.outdated.add("board");
    if (this.tab === "board") this.drawPanel();
  }

  drawDetails() {
    // They come with the rows, and of a value with all that they tell.
    const needed = this.view.selected ? ["kernels", "memory"] : [PANELS[0].id];
    if (needed.some((id) => this.payload.late?.includes(id))) return;
    this.swap(this.slots.details, details({ ...this.view, payload: this.chosen, step: this.tab === "code" ? this.view.step : null }, this.showsPass, this.open, this.act));
    this.lift.draw(this.view.selected !== "" || this.open.pass !== "");
  }

  drawSelected() {
    this.showsPass = this.view.selected === "";
    this.drawSelection();
  }

  drawSelection() {
    this.trail.visit(this.view.selected);
    // First the details: what they leave of the panel is where it shows the selection.
    this.drawDetails();
    this.markPanel();
  }

  /** Replace a panel and keep the keyboard where it was, or in the panel where that is gone. @param {HTMLElement} slot @param {...HTMLElement} content */
  swap(slot, ...content) {
    const focused = slot.contains(document.activeElement) ? /** @type {HTMLElement} */ (document.activeElement) : null;
    slot.replaceChildren(...content);
    if (focused) (find(slot, focused.dataset.testid ?? "") ?? slot).focus({ preventScroll: true });
  }

  // --- what was asked ------------------------------------------------------------------------------------------------

  /** @param {string} id */
  openTab(id) {
    // What a pass did would hide what is asked for now.
    if (id !== this.tab && this.showsPass && this.lift.isLifted) this.showPass("");
    this.tab = id;
    this.model.set("tab", id);
    this.model.save_changes();
    this.drawTabs();
    this.drawPanel();
    this.drawDetails();
  }

  /** Open a tab and move the keyboard into its panel, to the selected value's part where there is one. @param {string} id */
  goToTab(id) {
    this.openTab(id);
    const targets = [...this.slots.body.querySelectorAll('[tabindex="0"]')];
    const target = /** @type {HTMLElement | undefined} */ (targets.find((one) => one.querySelector(".tf-current")) ?? targets[0]);
    (target ?? find(this.slots.tabs, `tf-tab-${id}`))?.focus({ preventScroll: true });
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    const isTaken = event.defaultPrevented || this.root.querySelector("dialog[open]") !== null;
    const asked = isTaken ? null : shortcut(event);
    if (asked === null || (typeof asked === "number" && !PANELS[asked - 1])) return;
    event.preventDefault();
    if (typeof asked === "number") return this.goToTab(PANELS[asked - 1].id);
    const actions = {
      search: () => this.search.focus(),
      help: () => showHelp(this.root),
      passes: () => /** @type {HTMLElement | null} */ (this.slots.passes.querySelector("input:enabled, button:enabled, [tabindex='0']"))?.focus(),
      undo: () => this.act.undo(),
      redo: () => this.act.redo(),
      back: () => this.selectOnTrail(-1),
      forward: () => this.selectOnTrail(1),
    };
    actions[asked]();
  }

  /** @param {-1 | 1} by */
  selectOnTrail(by) {
    const name = this.trail.step(by);
    if (name !== null) this.select(name);
  }

  /** @param {Set<string> | null} matches */
  showMatches(matches) {
    this.matches = matches;
    this.markPanel();
  }

  /** The open one, but where it is about to be drawn anew. */
  markPanel() {
    if (!this.outdated.has(this.tab)) this.panels.get(this.tab)?.mark(this.view);
  }

  /** ← and → walk the tabs, Home and End go to the ends. @param {KeyboardEvent} event */
  onTabKey(event) {
    const at = PANELS.findIndex(({ id }) => id === this.tab);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: -1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.openTab((PANELS.at(to) ?? PANELS[0]).id);
    find(this.slots.tabs, `tf-tab-${this.tab}`)?.focus();
  }

  /** Unfold a kernel's source in its table and go there. @param {string} name */
  openKernel(name) {
    this.open.kernels.add(name);
    this.outdated.add("kernels");
    this.openTab("kernels");
    const button = find(this.slots.body, `tf-kernel-${name}`);
    button?.scrollIntoView({ block: "nearest" });
    button?.focus({ preventScroll: true });
  }

  /** Go to what was found. @param {string} key */
  openFinding(key) {
    this.goToTab("findings");
    const card = /** @type {HTMLElement | null} */ (this.slots.body.querySelector(`[data-key="${key}"]`));
    card?.scrollIntoView({ block: "nearest" });
    /** @type {HTMLElement | null | undefined} */ (card?.querySelector("button:enabled, pre"))?.focus({ preventScroll: true });
  }

  /** What this pass did comes in place of the selected value. @param {string} name */
  showPass(name) {
    if (name === this.open.pass) return;
    this.open.pass = name;
    this.showsPass = name !== "";
    markPass(this.slots.passes, name);
    this.drawSelection();
  }

  /** @param {string} value */
  select(value) {
    this.showsPass = value === "";
    if (value === this.view.selected) return this.drawSelection();
    this.model.set("selected", value);
    this.model.save_changes();
  }
}
