// The Code tab: both halves of the trace and its update as code, side by side, with what changed against the baseline and what one pass decided.

import { h, plural } from "../parts/dom.js";
import { decided, sentence } from "../passes/decisions.js";
import { CodePane } from "./pane.js";

/** @type {Half} */
const NO_UPDATE = { lines: [], ops: [0, 0], added: 0, removed: 0 };

/** @implements {Panel} */
export class CodePanel {
  /** @param {Act} act */
  constructor(act) {
    this.act = act;
    this.forward = new CodePane("Forward", act);
    this.backward = new CodePane("Backward", act);
    this.update = new CodePane("Update", act);
    this.panes = [this.forward, this.backward, this.update];
    this.columns = h("div", { class: "tf-panes" }, this.panes.map((pane) => pane.element));
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
      this.against,
      h("span", { class: "tf-jumps" }, this.previous, this.next, this.place),
      h("label", null, this.removed, "removed lines"),
      h("label", null, this.changes, "only changes"),
      h("label", null, this.frees, "del"),
    );
    this.alone = h("input", { type: "checkbox", "data-testid": "tf-alone", onchange: () => this.toggleAlone() });
    this.strip = h("div", { class: "tf-strip", hidden: true, "data-testid": "tf-strip" });
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
    /** What is drawn: the whole, or what one pass alone changed. @type {Pick<PassDiff, "forward" | "backward" | "update"> | null} */
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
    this.drawn = this.halves(this.view);
    const shown = { removed: this.removed.checked, changes: this.changes.checked, frees: this.frees.checked };
    this.forward.show(this.drawn.forward, payload, shown);
    this.backward.show(this.drawn.backward, payload, shown);
    const { update } = this.drawn;
    this.columns.classList.toggle("tf-panes-three", update !== null);
    this.update.element.hidden = update === null;
    this.update.show(update ?? NO_UPDATE, payload, shown);
    const whole = `Against ${payload.baseline.call}${payload.baseline.is_pinned ? " (pinned)" : ""}`;
    this.against.textContent = this.drawn === payload ? whole : `${pass} alone: before it and after it`;
    this.against.title = this.against.textContent;
    this.at = -1;
    this.drawPlace();
    this.stripped = ["", null];
    this.matches = null;
    this.mark(this.view);
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

  /** What the panes show: the whole, or of the pass that is walked to its own change. @param {View} view */
  halves({ payload, pass, step }) {
    return this.alone.checked && step && step.pass === pass ? step : payload;
  }

  /** Its own change of the pass that is walked to, if that is wanted and was not asked for. */
  askAlone() {
    const wanted = this.alone.checked ? (this.view?.pass ?? "") : "";
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
    for (const pane of this.panes) pane.markAll("tf-decided", one?.decisions.flatMap(({ values }) => values) ?? []);
    this.strip.hidden = !one;
    if (!one) return;
    const count = decided(one);
    const shown = new Set(this.panes.flatMap((pane) => pane.marked.get("tf-decided") ?? []));
    this.strip.replaceChildren(
      h("span", null, "What ", h("code", null, one.name), " did: ", h("b", null, sentence(one))),
      h("span", { class: "tf-note" }, count > 0 && `${plural(count, "decision")}, on the ${plural(shown.size, "line")} marked •`),
      this.aloneLabel(one),
      h("button", { class: "tf-chip tf-close", "aria-label": "close", onclick: () => this.act.showPass("") }, "×"),
    );
  }

  toggleAlone() {
    this.askAlone();
    if (this.view) this.mark(this.view);
  }

  /** @param {PassRecord} one */
  aloneLabel({ enabled, error }) {
    this.alone.disabled = !this.act.live || !enabled || error !== null;
    const title = this.act.live ? "the code before and after this pass alone" : "a saved page holds the code of the whole only";
    return h("label", { class: "tf-alone", title }, this.alone, "its own before → after");
  }

  // --- changes -------------------------------------------------------------------------------------------------------

  get starts() {
    return this.panes.flatMap((pane) => pane.starts.map((row) => ({ pane, row })));
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

  /** n and N walk the changes. @param {KeyboardEvent} event */
  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "n") this.jump(1);
    else if (event.key === "N") this.jump(-1);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}
