// One half of the trace as code: its lines in chunks, folds between changes, and marks of the selection, the search and a pass.

import { h, plural, signed } from "../parts/dom.js";
import { changeStarts, fold } from "../parts/folds.js";
import { codeLine, withModuleType } from "./line.js";

// Lines of one chunk are laid out together; chunks off the screen are not laid out at all.
const CHUNK = 100;
// As in code.css: what is not laid out yet must take the room that it will take, or the view jumps.
const HEIGHT = 18;
const BLANK_HEIGHT = 8;
const MARKS = /** @type {const} */ (["tf-selected", "tf-current", "tf-twin", "tf-jump"]);

/** @typedef {{ removed: boolean, changes: boolean, frees: boolean, side: boolean }} Shown what lines are shown: removed ones too, changes only, `del` too; whether it is one of two texts side by side */

export class CodePane {
  /**
   * @param {string} title "Forward" or "Backward"
   * @param {Act} act
   */
  constructor(title, act) {
    this.act = act;
    /** Every token of a value. @type {Map<string, HTMLElement[]>} */
    this.tokens = new Map();
    /** The line that defines a value. @type {Map<string, HTMLElement>} */
    this.rows = new Map();
    /** Where each run of changed lines begins: a line that names a value, if one does. @type {(HTMLElement | undefined)[]} */
    this.starts = [];
    /** What unfolds the lines of a value that is folded away. @type {Map<string, () => void>} */
    this.folded = new Map();
    /** What has which mark: looking for it among all lines took longer than marking. @type {Map<string, HTMLElement[]>} */
    this.marked = new Map();
    /** The values whose lines have a mark, for lines that are unfolded later. @type {Map<string, string[]>} */
    this.names = new Map();
    /** @type {(line: Line) => HTMLElement} */
    this.row = () => h("div");
    this.count = h("span", { class: "tf-note" });
    this.changes = h("span", { class: "tf-changes" });
    this.body = h("div", { class: "tf-code", tabindex: "0", role: "group", "aria-label": `${title} trace`, "data-testid": `tf-code-${title.toLowerCase()}` });
    this.body.addEventListener("click", (event) => this.onClick(event));
    this.body.addEventListener("keydown", (event) => this.onKey(event));
    /** Whether the list of inputs is unfolded; a long one hides what the reader came for. */
    this.inputsOpen = false;
    this.element = h("section", { class: "tf-pane" }, h("div", { class: "tf-pane-head" }, h("h3", null, title), this.count, this.changes), this.body);
  }

  /** @param {Half} half @param {Payload} payload @param {Shown} shown */
  show(half, { values, kernels: records, baseline }, shown) {
    const anchor = this.anchor();
    for (const known of [this.tokens, this.rows, this.folded, this.marked, this.names]) known.clear();
    const kernels = new Set(records.map((kernel) => kernel.name));
    this.row = (line) => this.define(line, codeLine(line, values, kernels, (name, token) => this.note(name, token)));
    const lines = half.lines
      .filter((line) => (shown.removed || line.diff !== "-") && (shown.frees || line.kind !== "free"))
      .map((line, at, all) => withModuleType(line, all[at + 1], values));
    const body = lines.filter((line) => line.kind !== "input" && line.kind !== "signature");
    const inputs = lines.filter((line) => line.kind === "input");
    const content = shown.changes ? fold(body).flatMap((run) => (run.folded ? [this.fold(run.lines)] : this.chunks(run.lines))) : this.chunks(body);
    this.body.replaceChildren(...lines.filter((line) => line.kind === "signature").map(this.row), this.inputs(inputs, shown), ...content);
    this.starts = this.changeRows(body);
    this.head(half, baseline.call);
    this.restore(anchor);
  }

  /** @param {Half} half @param {string} baseline */
  head(half, baseline) {
    const [before, after] = half.ops;
    this.count.textContent = before === after ? `${after} ops` : `${before} → ${after} ops`;
    this.changes.replaceChildren(
      ...(half.added ? [h("span", { class: "tf-plus" }, `+${half.added}`)] : []),
      ...(half.removed ? [h("span", { class: "tf-minus" }, `−${half.removed}`)] : []),
    );
    this.changes.title = `lines against ${baseline}; ${signed(after - before)} ops`;
  }

  // --- lines ---------------------------------------------------------------------------------------------------------

  /** @param {string} name @param {HTMLElement} token */
  note(name, token) {
    const others = this.tokens.get(name);
    if (others) others.push(token);
    else this.tokens.set(name, [token]);
  }

  /** A value that was rewritten has two lines: the new one is where it is defined. @param {Line} line @param {HTMLElement} row */
  define(line, row) {
    if (line.value && (line.diff !== "-" || !this.rows.has(line.value))) this.rows.set(line.value, row);
    return row;
  }

  /** @param {Line[]} lines */
  chunks(lines) {
    /** @type {HTMLElement[]} */
    const chunks = [];
    for (let start = 0; start < lines.length; start += CHUNK) {
      const some = lines.slice(start, start + CHUNK);
      const chunk = h("div", { class: "tf-chunk" }, some.map(this.row));
      chunk.style.containIntrinsicHeight = `auto ${some.reduce((sum, { kind }) => sum + (kind === "blank" ? BLANK_HEIGHT : HEIGHT), 0)}px`;
      chunks.push(chunk);
    }
    return chunks;
  }

  /** Unchanged lines as one button, made only when they are asked for. @param {Line[]} lines */
  fold(lines) {
    const button = h("button", { class: "tf-fold", "aria-expanded": "false" }, `… ${plural(lines.length, "unchanged line")}`);
    const unfold = () => {
      for (const { value } of lines) this.folded.delete(value);
      const chunks = this.chunks(lines);
      const hadFocus = button === document.activeElement;
      button.replaceWith(...chunks);
      for (const [mark, names] of this.names) this.markAll(mark, names);
      if (hadFocus) this.body.focus({ preventScroll: true });
    };
    button.onclick = unfold;
    for (const { value } of lines) if (value) this.folded.set(value, unfold);
    return button;
  }

  /** @param {Line[]} lines @param {Shown} shown */
  inputs(lines, { removed, side }) {
    const count = (/** @type {string} */ mark) => lines.filter((line) => line.diff === mark && !line.filler).length;
    const fillers = lines.filter((line) => line.filler).length;
    const [plus, minus] = [count("+"), count("-")];
    return h(
      "details",
      { class: "tf-inputs", open: this.inputsOpen, ontoggle: (/** @type {any} */ e) => (this.inputsOpen = e.target.open) },
      h(
        "summary",
        null,
        plural(lines.length - fillers - (side ? 0 : minus), "input"),
        removed && plus > 0 && h("span", { class: "tf-plus" }, ` +${plus}`),
        removed && minus > 0 && h("span", { class: "tf-minus" }, ` −${minus}`),
      ),
      h("div", { class: "tf-chunk" }, lines.map(this.row)),
    );
  }

  /** @param {boolean} isOpen */
  openInputs(isOpen) {
    const inputs = this.body.querySelector("details");
    if (inputs && inputs.open !== isOpen) inputs.open = isOpen;
  }

  /** The first line of each change that names a value, since that can be selected. @param {Line[]} lines */
  changeRows(lines) {
    return changeStarts(lines).map((start) => {
      let at = start;
      while (!lines[at].value && lines[at + 1] && lines[at + 1].diff !== " ") at += 1;
      return this.rows.get(lines[at].value);
    });
  }

  // --- what stays in view --------------------------------------------------------------------------------------------

  /** The value at the top of the view and how far it is from there. @returns {{ value: string, by: number } | null} */
  anchor() {
    const top = this.body.getBoundingClientRect().top;
    if (this.body.scrollTop === 0) return null;
    const isBelow = (/** @type {Element} */ element) => element.getBoundingClientRect().bottom > top;
    const chunk = [...this.body.children].find(isBelow);
    const rows = /** @type {HTMLElement[]} */ ([...(chunk?.querySelectorAll("[data-defines]") ?? [])]);
    const row = rows.find((one) => isBelow(one) && this.rows.get(one.dataset.defines ?? "") === one);
    return row ? { value: row.dataset.defines ?? "", by: row.getBoundingClientRect().top - top } : null;
  }

  /** @param {{ value: string, by: number } | null} anchor */
  restore(anchor) {
    const row = anchor && this.rows.get(anchor.value);
    if (!row) return;
    const align = () => (this.body.scrollTop += row.getBoundingClientRect().top - this.body.getBoundingClientRect().top - anchor.by);
    align();
    // Chunks that were off the screen get their real height only now.
    requestAnimationFrame(align);
  }

  /** Scrolls this pane only: `scrollIntoView` would move the notebook too. @param {HTMLElement} target */
  reveal(target) {
    const bring = () => {
      const box = this.body.getBoundingClientRect();
      const at = target.getBoundingClientRect();
      if (at.top < box.top || at.bottom > box.bottom) this.body.scrollTop += at.top - box.top - box.height / 3;
    };
    bring();
    requestAnimationFrame(bring);
  }

  // --- marks ---------------------------------------------------------------------------------------------------------

  /** Mark the uses of `name`, its line and its twins'; bring the line into this pane's view. @param {string} name @param {string[]} twins */
  highlight(name, twins) {
    for (const mark of MARKS) this.markAll(mark, []);
    if (!name) return;
    for (const one of [name, ...twins]) this.folded.get(one)?.();
    this.markOnly("tf-selected", this.tokens.get(name) ?? []);
    this.markAll("tf-current", [name]);
    this.markAll("tf-twin", twins);
    const own = this.rows.get(name);
    const twin = twins.map((other) => this.rows.get(other)).find(Boolean);
    // A saved value is a mere input of the backward; its twin there says more.
    const target = own?.classList.contains("tf-is-op") ? own : (twin ?? own ?? this.tokens.get(name)?.[0]);
    if (!target) return;
    target.closest("details")?.setAttribute("open", "");
    this.reveal(target);
  }

  /** Mark the lines of `names` with a class, and no others. @param {string} mark @param {Iterable<string>} names */
  markAll(mark, names) {
    this.names.set(mark, [...names]);
    this.markOnly(mark, [...names].map((name) => this.rows.get(name)).filter((row) => row !== undefined));
  }

  /** @param {string} mark @param {HTMLElement[]} elements */
  markOnly(mark, elements) {
    for (const marked of this.marked.get(mark) ?? []) marked.classList.remove(mark);
    for (const element of elements) element.classList.add(mark);
    this.marked.set(mark, elements);
  }

  // --- what was asked ------------------------------------------------------------------------------------------------

  /** @param {MouseEvent} event */
  onClick(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    const kernel = /** @type {HTMLElement | null} */ (target.closest("[data-kernel]"));
    if (kernel) return this.act.openKernel(/** @type {string} */ (kernel.dataset.kernel));
    const token = /** @type {HTMLElement | null} */ (target.closest("[data-value]"));
    const line = /** @type {HTMLElement | null} */ (target.closest("[data-defines]"));
    const value = token?.dataset.value ?? line?.dataset.defines;
    if (value) this.act.select(value);
    else target.closest(".tf-is-signature, .tf-is-return, .tf-is-free")?.classList.toggle("tf-unfolded");
  }

  /** Up and down walk the values, Escape clears. @param {KeyboardEvent} event */
  onKey(event) {
    if (event.key === "Escape") return this.act.select("");
    const by = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
    if (!by || this.rows.size === 0 || event.target !== this.body) return;
    event.preventDefault();
    event.stopPropagation();
    const names = [...this.rows].filter(([, row]) => !row.closest("details:not([open])")).map(([name]) => name);
    const current = names.findIndex((name) => this.rows.get(name)?.classList.contains("tf-current"));
    const next = current < 0 ? (by > 0 ? 0 : names.length - 1) : Math.min(names.length - 1, Math.max(0, current + by));
    this.act.select(names[next]);
  }
}
