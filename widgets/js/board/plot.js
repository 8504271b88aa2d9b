// Time against peak memory: a point for each row of the board, and the frontier, below which nothing was found. Points are
// buttons at shares of the area, so that nothing is measured and nothing moves when the panel is made wider.

import { formatBytes, formatTime, h } from "../parts/dom.js";
import { KINDS } from "../parts/widgets.js";

/** @typedef {{ from: number, to: number }} Axis */

/** From below the least to above the most, so that no point lies on the edge. @param {number[]} numbers @returns {Axis} */
export function axis(numbers) {
  const [least, most] = [Math.min(...numbers), Math.max(...numbers)];
  const margin = 0.08 * (most - least || most || 1);
  return { from: Math.max(0, least - margin), to: most + margin };
}

/** Where a number lies on an axis, from 0 to 1. @param {number} number @param {Axis} on */
export const place = (number, { from, to }) => (number - from) / (to - from);

/** The frontier as boxes whose upper and right edges are its steps: `[left, right, bottom, top]`, from 0 to 1. @param {BoardRow[]} rows @param {Axis} x @param {Axis} y */
export function steps(rows, x, y) {
  const best = rows.filter((row) => row.is_best).sort((one, other) => one.peak_bytes - other.peak_bytes);
  return best.slice(1).map((row, at) => [place(best[at].peak_bytes, x), place(row.peak_bytes, x), place(row.step_us, y), place(best[at].step_us, y)]);
}

/** @param {BoardState} board @param {(row: BoardRow) => void} open @param {(row: BoardRow) => string} title */
export function plot(board, open, title) {
  const rows = board.rows.filter((row) => row.device === board.device);
  if (board.rows.length === 0) return h("p", { class: "tf-note" }, "Nothing that was tried is stored here: run it in a notebook, whose view notes every configuration.");
  if (rows.length === 0) return h("p", { class: "tf-note" }, "No time of what was tried is known on this device.");
  const x = axis(rows.map((row) => row.peak_bytes));
  const y = axis(rows.map((row) => row.step_us));
  const area = h("div", { class: "tf-plot-area" }, steps(rows, x, y).map(step), rows.flatMap((row) => point(row, board, x, y, open, title)));
  const kinds = [...new Set(rows.map((row) => row.kind))].map((kind) => h("span", { class: "tf-purpose", title: KINDS[kind][1] }, h("i", { class: `tf-mark tf-mark-${kind}` }), kind));
  return h(
    "figure",
    { class: "tf-plot", "data-testid": "tf-plot" },
    h("div", { class: "tf-plot-y", "aria-hidden": "true" }, h("span", null, formatTime(y.to)), h("b", null, "step"), h("span", null, formatTime(y.from))),
    area,
    h("div", { class: "tf-plot-x", "aria-hidden": "true" }, h("span", null, formatBytes(x.from)), h("b", null, "peak memory"), h("span", null, formatBytes(x.to))),
    h("figcaption", { class: "tf-plot-legend" }, kinds, h("span", { class: "tf-purpose" }, h("i", { class: "tf-frontier-key" }), "frontier: nothing found is better in both")),
  );
}

/** @param {number[]} box */
function step([left, right, bottom, top]) {
  const box = h("i", { class: "tf-frontier", "aria-hidden": "true" });
  Object.assign(box.style, { left: percent(left), width: percent(right - left), bottom: percent(bottom), height: percent(top - bottom) });
  return box;
}

/** @param {BoardRow} row @param {BoardState} board @param {Axis} x @param {Axis} y @param {(row: BoardRow) => void} open @param {(row: BoardRow) => string} title */
function point(row, board, x, y, open, title) {
  const other = row.capture === board.capture ? "" : " tf-point-other";
  const shown = row.is_shown ? " tf-point-shown" : "";
  const text = title(row);
  // The rows of the table are the way for the keyboard: each point is one of them.
  const element = h("button", { class: `tf-point tf-mark tf-mark-${row.kind}${other}${shown}`, title: text, "aria-label": text, tabindex: "-1", onclick: () => open(row) });
  Object.assign(element.style, { left: percent(place(row.peak_bytes, x)), bottom: percent(place(row.step_us, y)) });
  return row.is_captured ? [element, label(row, x, y, "captured")] : [element];
}

/** @param {BoardRow} row @param {Axis} x @param {Axis} y @param {string} text */
function label(row, x, y, text) {
  const isRight = place(row.peak_bytes, x) > 0.8;
  const element = h("span", { class: `tf-point-label${isRight ? " tf-point-left" : ""}`, "aria-hidden": "true" }, text);
  Object.assign(element.style, { left: percent(place(row.peak_bytes, x)), bottom: percent(place(row.step_us, y)) });
  return element;
}

/** @param {number} share */
const percent = (share) => `${(100 * share).toFixed(2)}%`;
