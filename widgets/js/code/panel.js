// The Code tab: the halves of the trace and its update as code, each with what changed marked, or one of them before and after, side by side; of all passes together or of one step of the pipeline.

import { h, plural } from "../parts/dom.js";
import { NEEDS_KERNEL } from "../parts/widgets.js";
import { decided, sentence } from "../passes/decisions.js";
import { CodePane } from "./pane.js";
import { sides } from "./sides.js";
import { Steps, WHOLE } from "./steps.js";

/** @type {Half} */
const NO_UPDATE = { lines: [], ops: [0, 0], added: 0, removed: 0 };
/** What Python calls all passes together, where the whole text before them is wanted. */
const TOGETHER = "*";
/** What is laid out, by the value of its choice. */
const LAYOUTS = /** @type {const} */ ([["halves", "halves, marked"], ["forward", "before | after: forward"], ["backward", "before | after: backward"], ["update", "before | after: update"]]);

/** @implements {Panel} */
export class CodePanel {
  /** @param {Act} act */
  constructor(act) {
    this.act = act;
    this.forward = new CodePane("Forward", act);
    this.backward = new CodePane("Backward", act);
    this.update = new CodePane("Update", act);
    this.before = new CodePane("Before", act);
    this.after = new CodePane("After", act);
    keepTogether(this.before, this.after);
    this.halvesShown = [this.forward, this.backward, this.update];
    this.columns = h("div", { class: "tf-panes" }, this.halvesShown.map((pane) => pane.element));
    this.layout = h("select", { "aria-label": "layout", "data-testid": "tf-code-layout", onchange: () => this.lay() }, LAYOUTS.map(([value, said]) => h("option", { value }, said)));
    this.steps = new Steps((pass) => this.step(pass));
    const toggle = (/** @type {string} */ id, /** @type {boolean} */ checked) => h("input", { type: "checkbox", checked, "data-testid": id, onchange: () => this.redraw() });
    this.removed = toggle("tf-diff", true);
    this.changes = toggle("tf-only-changes", false);
    this.frees = toggle("tf-frees", true);
    this.against = h("span", { class: "tf-note tf-against" });
    this.previous = h("button", { class: "tf-chip", onclick: () => this.jump(-1), title: "previous change (N)", "aria-label": "previous change", "data-testid": "tf-previous-change" }, "↑");
    this.next = h("button", { class: "tf-chip", onclick: () => this.jump(1), title: "next change (n)", "aria-label": "next change", "data-testid": "tf-next-change" }, "↓");
    this.place = h("span", { class: "tf-note", "aria-live": "polite" });
    const toolbar = h(
      "div",
      { class: "tf-toolbar" },
      this.layout,
      h("span", { class: "tf-jumps" }, this.previous, this.next, this.place),
      h("label", null, this.removed, "removed lines"),
      h("label", null, this.changes, "only changes"),
      h("label", null, this.frees, "del"),
      this.steps.element,
    );
    this.alone = h("input", { type: "checkbox", "data-testid": "tf-alone", onchange: () => this.toggleAlone() });
    this.aloneLabel = h("label", { class: "tf-alone" }, this.alone, "its own before → after");
    this.close = h("button", { class: "tf-chip tf-close", "aria-label": "close", onclick: () => this.step(WHOLE) }, "×");
    this.did = h("span", { class: "tf-did" });
    this.strip = h("div", { class: "tf-strip", "data-testid": "tf-strip" }, this.against, this.did, this.aloneLabel, this.close);
    this.element = h("div", { class: "tf-code-panel" }, toolbar, this.strip, this.columns);
    this.element.addEventListener("keydown", (event) => this.onKey(event));
    /** @type {View | null} */
    this.view = null;
    /** The change that was jumped to last, of both panes'. */
    this.at = -1;
    /** The pass whose strip is shown, of which payload. @type {[string, Payload | null]} */
    this.stripped = ["", null];
    /** @type {View["matches"]} */
    this.matches = null;
    /** The pass whose own change Python was asked for last. */
    this.asked = "";
    /** What is drawn: the whole, or what Python was asked for. @type {Payload | PassDiff | null} */
    this.drawn = null;
  }

  /** @param {View} view */
  draw(view) {
    this.view = view;
    // Progress of a measurement changes no line.
    if (this.drawn !== this.halves(view)) this.redraw();
  }

  redraw() {
    if (!this.view) return;
    const { payload, pass } = this.view;
    const drawn = this.halves(this.view);
    this.drawn = drawn;
    this.layout.options[3].hidden = drawn.update === null;
    if (this.layout.value === "update" && drawn.update === null) this.layout.value = "halves";
    if (this.isBeside) this.drawSides(drawn, payload);
    else this.drawHalves(drawn, payload);
    for (const option of [...this.layout.options].slice(1)) option.disabled = !this.act.live;
    this.layout.title = this.act.live ? "" : NEEDS_KERNEL;
    const whole = `Against ${payload.baseline.call}${payload.baseline.is_pinned ? " (pinned)" : ""}`;
    this.against.textContent = drawn === payload || !this.alone.checked ? whole : `${pass} alone: before it and after it`;
    this.against.title = this.against.textContent;
    this.at = -1;
    this.drawPlace();
    this.stripped = ["", null];
    this.matches = null;
    this.mark(this.view);
  }

  /** Whether two texts stand side by side, before and after. */
  get isBeside() {
    return this.layout.value !== "halves";
  }

  get panes() {
    return this.isBeside ? [this.before, this.after] : this.halvesShown;
  }

  lay() {
    this.columns.replaceChildren(...this.panes.map((pane) => pane.element));
    this.columns.classList.toggle("tf-panes-sides", this.isBeside);
    this.removed.disabled = this.frees.disabled = this.isBeside;
    this.redraw();
    this.askAlone();
  }

  /** @param {Payload | PassDiff} drawn @param {Payload} payload */
  drawHalves({ forward, backward, update }, payload) {
    const shown = { removed: this.removed.checked, changes: this.changes.checked, frees: this.frees.checked, side: false };
    this.forward.show(forward, payload, shown);
    this.backward.show(backward, payload, shown);
    this.columns.classList.toggle("tf-panes-three", update !== null);
    this.update.element.hidden = update === null;
    this.update.show(update ?? NO_UPDATE, payload, shown);
  }

  /** The payload has no text before: until Python has sent it, both sides are empty. @param {Payload | PassDiff} drawn @param {Payload} payload */
  drawSides(drawn, payload) {
    const found = drawn[/** @type {"forward" | "backward" | "update"} */ (this.layout.value)] ?? NO_UPDATE;
    const half = "before" in found ? /** @type {TwoTexts} */ (found) : { ...found, lines: [], before: [] };
    const shown = { removed: true, changes: this.changes.checked, frees: false, side: true };
    const { before, after } = sides(half);
    const { ops: [old, now], added, removed } = half;
    this.columns.classList.remove("tf-panes-three");
    this.before.show({ lines: before, ops: [old, old], added: 0, removed }, payload, shown);
    this.after.show({ lines: after, ops: [now, now], added, removed: 0 }, payload, shown);
  }

  /** @param {View} view */
  mark(view) {
    this.view = view;
    if (this.drawn !== this.halves(view)) return this.redraw();
    const twins = view.payload.values[view.selected]?.twins ?? [];
    for (const pane of this.panes) pane.highlight(view.selected, twins);
    if (this.matches !== view.matches) for (const pane of this.panes) pane.markAll("tf-match", view.matches ?? []);
    this.matches = view.matches;
    this.drawStrip(view);
  }

  /** What the panes show: the whole, or what was asked of Python. @param {View} view */
  halves(view) {
    return view.step && view.step.pass === this.wanted(view) ? view.step : view.payload;
  }

  /** What is to be asked of Python: the own change of the pass that is walked to, or of all where two texts are shown. @param {View} view */
  wanted({ pass }) {
    return (this.alone.checked && pass) || (this.isBeside ? TOGETHER : "");
  }

  askAlone() {
    const wanted = this.view && this.act.live ? this.wanted(this.view) : "";
    if (wanted === this.asked) return;
    this.asked = wanted;
    this.act.showAlone(wanted);
  }

  // --- one pass ------------------------------------------------------------------------------------------------------

  /** What the pass that is walked to did, and the lines of the values that it decided about. @param {View} view */
  drawStrip({ pass, payload }) {
    if (this.stripped[0] === pass && this.stripped[1] === payload) return;
    this.askAlone();
    this.stripped = [pass, payload];
    const one = payload.passes.find(({ name }) => name === pass);
    for (const pane of this.panes) pane.markAll("tf-decided", payload.decisions[pass]?.flatMap(({ values }) => values) ?? []);
    this.strip.classList.toggle("tf-strip-whole", !one);
    this.alone.disabled = !this.act.live || !one?.enabled || one.error !== null;
    this.aloneLabel.title = this.act.live ? "the code before and after this pass alone" : "a saved page holds the code of the whole only";
    this.steps.draw(payload.passes, this.alone.checked ? pass : WHOLE, this.act.live);
    this.did.replaceChildren(...(one ? this.whatItDid(one, payload.decisions[pass]) : []));
    this.did.title = this.did.textContent ?? "";
  }

  /** @param {PassRecord} one @param {Decision[]} decisions */
  whatItDid(one, decisions) {
    const count = decided(decisions);
    const shown = new Set(this.panes.flatMap((pane) => pane.marked.get("tf-decided") ?? []));
    const marked = count > 0 ? [h("span", { class: "tf-note" }, ` ${plural(count, "decision")}, on the ${plural(shown.size, "line")} marked •`)] : [];
    return [h("span", null, "What ", h("code", null, one.name), " did: ", h("b", null, sentence(one))), ...marked];
  }

  /** Show what all passes did, or one of them alone. @param {string} pass */
  step(pass) {
    this.alone.checked = pass !== WHOLE;
    this.stripped = ["", null];
    if (pass === this.view?.pass) this.toggleAlone();
    else this.act.showPass(pass);
  }

  toggleAlone() {
    this.stripped = ["", null];
    if (this.view) this.mark(this.view);
  }

  // --- changes -------------------------------------------------------------------------------------------------------

  /** Side by side a change is where the text after it has it, or the one before where nothing is left. */
  get starts() {
    const { before, after } = this;
    const found = this.isBeside
      ? after.starts.map((row, at) => (row ? { pane: after, row } : { pane: before, row: before.starts[at] }))
      : this.panes.flatMap((pane) => pane.starts.map((row) => ({ pane, row })));
    return found.flatMap(({ pane, row }) => (row ? [{ pane, row }] : []));
  }

  /** @param {1 | -1} by */
  jump(by) {
    const { starts } = this;
    if (starts.length === 0) return;
    this.at = this.at < 0 ? (by > 0 ? 0 : starts.length - 1) : (this.at + by + starts.length) % starts.length;
    const { pane, row } = starts[this.at];
    this.act.select(row.dataset.defines ?? "");
    for (const one of this.panes) one.markOnly("tf-jump", one === pane ? [row] : []);
    pane.reveal(row);
    this.drawPlace();
  }

  drawPlace() {
    const { length } = this.starts;
    this.place.textContent = length === 0 ? "no changes" : this.at < 0 ? plural(length, "change") : `${this.at + 1} of ${length}`;
    this.previous.disabled = this.next.disabled = length === 0;
  }

  /** n and N walk the changes, comma and full stop the pipeline. @param {KeyboardEvent} event */
  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "n") this.jump(1);
    else if (event.key === "N") this.jump(-1);
    else if (event.key === ",") this.steps.walk(-1);
    else if (event.key === ".") this.steps.walk(1);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

/** Two texts side by side scroll together, and unfold their inputs together. @param {CodePane} one @param {CodePane} other */
function keepTogether(one, other) {
  for (const [from, to] of [[one, other], [other, one]]) {
    from.body.addEventListener("scroll", () => (to.body.scrollTop = from.body.scrollTop));
    // `toggle` does not bubble.
    from.body.addEventListener("toggle", ({ target }) => to.openInputs(/** @type {HTMLDetailsElement} */ (target).open), { capture: true });
  }
}
