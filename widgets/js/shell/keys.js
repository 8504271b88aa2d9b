// The keyboard of the whole view: one table, from which both the keys and the help dialog are made.

import { h } from "../parts/dom.js";

/** @typedef {"undo" | "redo" | "search" | "help" | "passes" | "back" | "forward"} Action */

/** @type {Record<string, Action>} */
const ACTIONS = { "/": "search", "?": "help", p: "passes", "[": "back", "]": "forward" };

const HELP = /** @type {[string, [string, string][]][]} */ ([
  ["Anywhere", [
    ["/", "search; Esc clears"],
    ["1 … 9", "open a tab"],
    ["p", "go to the passes"],
    ["Ctrl Z  Ctrl Shift Z", "take the last choice back, make it again (⌘ on a Mac)"],
    ["[  ]", "back and forward through what was selected"],
    ["?", "this list"],
  ]],
  ["Search", [
    ["Enter", "next match"],
    ["Shift Enter", "previous match"],
    ["op:mm  module:h.0  kernel:  dtype:bf16", "whole parts; * stands for anything"],
    ["phase:backward  saved  removed", "values of one kind"],
    [">1ms  <10us  >2MiB", "by time, by bytes"],
    ["-word", "without these"],
  ]],
  ["Trace", [
    ["↑ ↓  Home End", "walk the rows"],
    ["→ ←", "unfold, fold; of an op, its backward twin and back"],
    ["Enter", "unfold a module; show an op's code"],
    ["x", "identical layers one by one, or together"],
    ["Esc", "select nothing"],
  ]],
  ["Code", [
    ["n  N", "next and previous change"],
    [".  ,", "next and previous step of the pipeline"],
    ["↑ ↓", "walk the values; Esc selects nothing"],
  ]],
  ["Timeline", [
    ["← →  ↑ ↓  Home End", "walk the events of a lane, the lanes; without an event, pan"],
    ["Shift ← →", "measure from event to event; Esc clears"],
    ["+ −  0", "zoom in, out, all; Ctrl wheel too"],
    ["on the memory line: ↑ ↓  Enter  Delete", "a budget on the peak: move it, ask for it, take it away"],
    ["PageUp PageDown", "one window earlier, later; Shift wheel pans too"],
  ]],
]);

/**
 * What a key asks of the view, or the number of a tab to open; null where it is not ours: it is typed into a field, or belongs
 * to the browser. @param {{ key: string, ctrlKey?: boolean, metaKey?: boolean, altKey?: boolean, shiftKey?: boolean, target?: unknown }} event
 * @returns {Action | number | null}
 */
export function shortcut({ key, ctrlKey, metaKey, altKey, shiftKey, target }) {
  if ((ctrlKey || metaKey) && !altKey && !isTyping(target)) {
    const letter = key.toLowerCase();
    return letter === "y" || (letter === "z" && shiftKey) ? "redo" : letter === "z" ? "undo" : null;
  }
  // AltGr, by which many keyboards write [ and ], counts as Ctrl and Alt together.
  const isWritten = ctrlKey === altKey;
  if (metaKey || !isWritten || isTyping(target)) return null;
  if (/^[1-9]$/.test(key)) return Number(key);
  return Object.hasOwn(ACTIONS, key) ? ACTIONS[key] : null;
}

const NO_TEXT = new Set(["checkbox", "radio", "range", "button"]);

/** @param {any} target */
function isTyping(target) {
  if (!target?.tagName) return false;
  if (target.isContentEditable || ["TEXTAREA", "SELECT"].includes(target.tagName)) return true;
  return target.tagName === "INPUT" && !NO_TEXT.has(target.type);
}

/** What was selected, to go back to and forward again. */
export class Trail {
  constructor() {
    /** @type {string[]} */
    this.names = [];
    this.at = -1;
  }

  /** Note a selection; whatever lay ahead is forgotten. @param {string} name */
  visit(name) {
    if (!name || name === this.names[this.at]) return;
    this.names.splice(this.at + 1, Infinity, name);
    this.at += 1;
  }

  /** The selection before or after; null at the ends. @param {-1 | 1} by @returns {string | null} */
  step(by) {
    const name = this.names[this.at + by];
    if (name === undefined) return null;
    this.at += by;
    return name;
  }
}

/** All keys in a modal dialog: the browser keeps the focus inside, closes it on Escape, and gives the focus back. @param {HTMLElement} host */
export function showHelp(host) {
  const close = () => dialog.close();
  const dialog = h(
    "dialog",
    { class: "tf-keys", role: "dialog", "aria-label": "Keys", "data-testid": "tf-help", onclose: () => dialog.remove() },
    h("div", { class: "tf-keys-head" }, h("h3", null, "Keys"), h("button", { class: "tf-chip", "aria-label": "close", onclick: close, "data-testid": "tf-help-close" }, "×")),
    HELP.map(([title, rows]) =>
      h("section", null, h("h4", null, title), h("dl", null, rows.flatMap(([keys, what]) => [h("dt", null, h("kbd", null, keys)), h("dd", null, what)]))),
    ),
  );
  // A click on what is behind the dialog.
  dialog.addEventListener("click", (event) => event.target === dialog && close());
  host.append(dialog);
  dialog.showModal();
}
