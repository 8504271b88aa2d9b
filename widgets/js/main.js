// The explorer: one model, one selection, panels in tabs. Python computes; this draws, and sends back what was asked.

import { details } from "./details.js";
import { h } from "./dom.js";
import { PANELS, STYLES } from "./panels.js";
import { passes } from "./passes.js";
import { verdict } from "./verdict.js";

export { mountPage } from "./page.js";

class Explorer {
  /** @param {Model} model @param {HTMLElement} host */
  constructor(model, host) {
    this.model = model;
    /** @type {Set<string> | null} */
    this.matches = null;
    /** The status that the panels were drawn with. */
    this.shown = model.get("status");
    /** @type {Open} */
    this.open = { passes: new Set(), kernels: new Set(), typed: {} };
    /** @type {Act} */
    this.act = {
      configure: (changes) => this.ask("passes", { type: "configure", changes }),
      measure: () => this.ask("timing", { type: "measure" }),
      select: (value) => this.select(value),
      openTab: (id) => this.openTab(id),
      openKernel: (name) => this.openKernel(name),
      search: () => {},
      ask: (panel, message) => this.ask(panel, message),
      get live() {
        return model.get("live");
      },
      holds: (changes) => model.holds?.(changes) ?? true,
    };
    /** Made when first opened. @type {Map<string, Panel>} */
    this.panels = new Map();
    /** Those that have missed a change while another one was shown. @type {Set<string>} */
    this.outdated = new Set();
    this.tab = PANELS[0].id;
    this.slots = {
      closed: h("div"),
      verdict: h("div"),
      passes: h("div", { class: "tf-side" }),
      tabs: h("div", { class: "tf-tabs", role: "tablist", "aria-label": "Panels" }),
      body: h("div", { class: "tf-tab-body", role: "tabpanel", id: unique("tf-panel") }),
      details: h("div", { class: "tf-aside" }),
    };
    const main = h("div", { class: "tf-main" }, this.slots.tabs, this.slots.body);
    this.root = h(
      "div",
      { class: "tf", "data-testid": "tf-root" },
      h("style", null, STYLES, hidden(`tf-still-${model.get("key")}`)),
      h("div", { class: "tf-frame" }, this.slots.closed, this.slots.verdict, h("div", { class: "tf-columns" }, this.slots.passes, main, this.slots.details)),
    );
    // JupyterLab's shortcuts would take single letters and arrows away from the controls in here.
    this.root.addEventListener("keydown", (event) => event.stopPropagation());
    host.append(this.root);
  }

  /** @returns {View} */
  get view() {
    const { model, matches } = this;
    return { payload: model.get("payload"), status: model.get("status"), selected: model.get("selected"), live: model.get("live"), timeline: model.get("timeline"), matches };
  }

  /** Send a message, and show at once that `panel` waits: the kernel may be running a cell. @param {Exclude<Status["busy"], "">} panel @param {Message} message */
  ask(panel, message) {
    this.root.dataset.busy = panel;
    this.send(message);
  }

  /** @param {Message} message */
  send(message) {
    try {
      this.model.send(message);
    } catch (error) {
      this.close(String(error));
    }
  }

  /** What the view knew stays on show. @param {string} why what sending raised: the kernel has ended or was started anew */
  close(why) {
    const text = `This view has lost its kernel (${why}): it shows what it knew. Run the cell again for one that answers.`;
    this.slots.closed.replaceChildren(h("p", { class: "tf-blocked", role: "status", "data-testid": "tf-closed" }, text));
    this.root.dataset.busy = "";
    this.model.set("live", false);
  }

  destroy() {
    for (const panel of this.panels.values()) panel.destroy?.();
  }

  // --- drawing -------------------------------------------------------------------------------------------------------

  drawAll() {
    if (this.view.live) this.slots.closed.replaceChildren();
    this.drawVerdict();
    this.drawSide();
    this.drawTabs();
    for (const id of this.panels.keys()) this.outdated.add(id);
    this.drawPanel();
    this.drawDetails();
    this.root.dataset.ready = "1";
  }

  /** Progress touches the verdict bar only, so that nobody's typing in the other panels is lost. */
  drawStatus() {
    const { status } = this.view;
    const isProgress = status.busy === this.shown.busy && status.error === this.shown.error;
    this.drawVerdict();
    if (isProgress) return;
    this.drawSide();
    if (status.error?.panel === "timing") this.openTab("timing");
    for (const id of this.panels.keys()) this.outdated.add(id);
    this.drawPanel();
  }

  drawVerdict() {
    const { payload, status, live } = this.view;
    this.root.dataset.busy = status.busy;
    this.swap(this.slots.verdict, verdict(payload, status, live, this.act.measure));
  }

  drawSide() {
    const { payload, status } = this.view;
    this.shown = status;
    this.swap(this.slots.passes, passes(payload, status, this.open, this.act));
  }

  drawTabs() {
    const { payload } = this.view;
    const tabs = PANELS.map(({ id, label }) =>
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
    if (this.outdated.delete(spec.id)) panel.draw(this.view);
    panel.mark(this.view);
  }

  drawDetails() {
    const { selected, payload } = this.view;
    this.swap(this.slots.details, details(selected, payload, this.act));
  }

  drawSelection() {
    this.panels.get(this.tab)?.mark(this.view);
    this.drawDetails();
  }

  /** Replace a panel and keep the keyboard where it was. @param {HTMLElement} slot @param {...HTMLElement} content */
  swap(slot, ...content) {
    const focused = slot.contains(document.activeElement) ? /** @type {HTMLElement} */ (document.activeElement).dataset.testid : undefined;
    slot.replaceChildren(...content);
    if (focused) find(slot, focused)?.focus({ preventScroll: true });
  }

  // --- what was asked ------------------------------------------------------------------------------------------------

  /** @param {string} id */
  openTab(id) {
    this.tab = id;
    this.drawTabs();
    this.drawPanel();
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

  /** @param {string} value */
  select(value) {
    this.model.set("selected", value);
    this.model.save_changes();
  }
}

/** The rule that hides the view's still form, and in JupyterLab the output that it is. @param {string} name a class */
function hidden(name) {
  return `.jp-OutputArea-child:has(.${name}), .${name} { display: none; }`;
}

/** @param {HTMLElement} inside @param {string} id @returns {HTMLElement | null} */
function find(inside, id) {
  return inside.querySelector(`[data-testid="${CSS.escape(id)}"]`);
}

let count = 0;

/** An id that no other explorer on the page has. @param {string} prefix */
function unique(prefix) {
  count += 1;
  return `${prefix}-${count}`;
}

/** @param {{ model: Model, el: HTMLElement }} context @returns {() => void} the clean-up */
function render({ model, el }) {
  const explorer = new Explorer(model, el);
  const listeners = /** @type {[string, () => void][]} */ ([
    ["change:payload", () => explorer.drawAll()],
    ["change:status", () => explorer.drawStatus()],
    ["change:timeline", () => explorer.drawAll()],
    ["change:live", () => explorer.drawAll()],
    // ipywidgets says that the connection was lost or made again, and to us not which: a message shows it.
    ["comm_live_update", () => explorer.send({ type: "hello" })],
    ["change:selected", () => explorer.drawSelection()],
  ]);
  for (const [event, listener] of listeners) model.on(event, listener);
  explorer.drawAll();
  return () => {
    for (const [event, listener] of listeners) model.off(event, listener);
    explorer.destroy();
  };
}

export default { render };
