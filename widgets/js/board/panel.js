// The Board tab: every configuration that was tried, as a point and as a row, to go back to and to compare.

import { h } from "../parts/dom.js";
import { NEEDS_KERNEL } from "../parts/widgets.js";
import { comparison } from "./compare.js";
import { plot } from "./plot.js";
import { askForSweep } from "./sweep.js";
import { idOf, table, titleOf } from "./table.js";

export class BoardPanel {
  /** @param {Act} act */
  constructor(act) {
    this.act = act;
    /** @type {View | null} */
    this.view = null;
    /** The rows marked for comparing, at most two. @type {string[]} */
    this.marked = [];
    this.order = "tried";
    /** The comparison that the reader went back from. @type {Comparison | null} */
    this.left = null;
    this.sweep = h("button", { class: "tf-button", onclick: () => this.ask(), "data-testid": "tf-board-sweep" }, "Sweep…");
    this.compare = h("button", { class: "tf-button", onclick: () => this.compareMarked(), "data-testid": "tf-board-compare" }, "Compare");
    this.said = h("span", { class: "tf-note tf-board-said", role: "status", "data-testid": "tf-board-said" });
    this.bar = h("div", { class: "tf-board-bar" }, this.sweep, this.compare, this.said);
    this.content = h("div", { class: "tf-board-content", tabindex: "0", role: "group", "aria-label": "what was tried" });
    this.element = h("div", { class: "tf-board" }, this.bar, this.content);
  }

  /** @param {View} view */
  draw(view) {
    this.view = view;
    this.drawBar(view);
    const { board, status } = view;
    const error = status.error?.panel === "board" ? h("p", { class: "tf-error", role: "alert", "data-testid": "tf-error-board" }, status.error.message) : "";
    const found = board.comparison;
    const focused = /** @type {HTMLElement | null} */ (this.content.contains(document.activeElement) ? document.activeElement : null);
    if (found && found !== this.left) this.content.replaceChildren(error, comparison(found, () => this.back(found)));
    else this.content.replaceChildren(error, plot(board, (row) => this.open(row), (row) => `${titleOf(row, board)}${this.isReachable(row) ? "" : `; ${NEEDS_KERNEL}`}`), this.rows(board));
    if (focused) this.refocus(focused);
  }

  mark() {}

  /** @param {View} view */
  drawBar({ board, status, live }) {
    const isBusy = status.busy !== "";
    this.sweep.disabled = !live || isBusy;
    this.sweep.title = live ? "try many weights, budgets and passes" : NEEDS_KERNEL;
    this.compare.disabled = !live || isBusy || this.marked.length !== 2;
    this.compare.title = live ? "mark two rows: what differs, by module and by pass" : NEEDS_KERNEL;
    const best = board.rows.filter((row) => row.is_best).length;
    const here = board.rows.filter((row) => this.isReachable(row)).length;
    const others = here === board.rows.length ? "all on this page; Sweep" : `${here} of them on this page; the others, Sweep`;
    const stored = `${board.rows.length} stored, ${others} and Compare need a kernel: run it in a notebook`;
    this.said.textContent = !live ? stored : status.busy === "board" ? "trying…: its progress stands above" : `${board.rows.length} tried, ${best} on the frontier; ${this.marked.length} of 2 marked${board.said ? `; ${board.said}` : ""}`;
    this.said.title = this.said.textContent;
  }

  /** @param {BoardState} board */
  rows(board) {
    return table(board, {
      marked: this.marked,
      isLive: this.act.live,
      order: this.order,
      isReachable: (row) => this.isReachable(row),
      open: (row) => this.open(row),
      mark: (row) => this.toggle(row),
      sort: (order) => {
        this.order = order;
        this.redraw();
      },
    });
  }

  redraw() {
    if (this.view) this.draw(this.view);
  }

  /** The control that has the place of one that was drawn anew. @param {HTMLElement} was */
  refocus(was) {
    const { testid, board } = was.dataset;
    const [name, value] = board ? ["data-board", board] : ["data-testid", testid ?? ""];
    const now = value ? /** @type {HTMLElement | null} */ (this.content.querySelector(`[${name}="${CSS.escape(value)}"]`)) : null;
    (now ?? this.content).focus({ preventScroll: true });
  }

  // --- what is done with a row ---------------------------------------------------------------------------------------

  /** @param {BoardRow} row */
  isReachable(row) {
    const { capture } = /** @type {View} */ (this.view).board;
    return this.act.live || (row.capture === capture && this.act.holds(row.config));
  }

  /** Show it: a choice as any other, which is taken back as one. @param {BoardRow} row */
  open(row) {
    if (!this.isReachable(row)) return;
    const { board, payload } = /** @type {View} */ (this.view);
    if (row.capture === board.capture) {
      const changed = Object.entries(row.config).filter(([name, value]) => JSON.stringify(value) !== JSON.stringify(payload.config[name]));
      if (changed.length > 0) this.act.configure(Object.fromEntries(changed));
      return;
    }
    const back = { capture: board.capture, config: payload.config };
    this.act.ask("passes", { type: "return", capture: row.capture, config: row.config, back });
  }

  /** @param {BoardRow} row */
  toggle(row) {
    const id = idOf(row);
    this.marked = this.marked.includes(id) ? this.marked.filter((one) => one !== id) : [...this.marked, id].slice(-2);
    this.redraw();
  }

  compareMarked() {
    const { board } = /** @type {View} */ (this.view);
    this.left = null;
    const pair = this.marked.map((id) => board.rows.find((row) => idOf(row) === id)).filter((row) => row !== undefined);
    this.act.ask("board", { type: "compare", pair: pair.map(({ capture, config }) => ({ capture, config })) });
  }

  /** @param {Comparison} found */
  back(found) {
    this.left = found;
    this.redraw();
    this.compare.focus({ preventScroll: true });
  }

  ask() {
    const { payload, board } = /** @type {View} */ (this.view);
    const root = /** @type {HTMLElement} */ (this.element.closest(".tf"));
    askForSweep(root, payload, board.gathers, (message) => this.act.ask("board", message));
  }
}

