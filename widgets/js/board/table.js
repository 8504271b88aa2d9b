// The rows of the board: each a configuration, with what it takes, and a box that marks it for comparing.

import { bounds, figure, formatBytes, formatTime, h } from "../parts/dom.js";
import { KINDS, NEEDS_KERNEL } from "../parts/widgets.js";

/** A row's own words, for its point. @param {BoardRow} row @param {BoardState} board */
export function titleOf(row, board) {
  const whose = board.captures.length > 1 ? `${board.captures[row.capture]}: ` : "";
  return `${whose}${row.name}: ${formatTime(row.step_us)} ${row.kind}, peak ${formatBytes(row.peak_bytes)}`;
}

/** Orders by a column; 0 keeps the order in which they were tried. @type {Record<string, (row: BoardRow) => number>} */
export const ORDERS = { tried: () => 0, step: (row) => row.step_us, peak: (row) => row.peak_bytes };

/** @param {BoardState} board @param {{ marked: string[], isLive: boolean, order: string, isReachable: (row: BoardRow) => boolean, open: (row: BoardRow) => void, mark: (row: BoardRow) => void, sort: (order: string) => void }} given */
export function table(board, { marked, isLive, order, isReachable, open, mark, sort }) {
  const rows = [...board.rows].sort((one, other) => ORDERS[order](one) - ORDERS[order](other));
  const several = board.captures.length > 1;
  const sorted = (/** @type {string} */ id, /** @type {string} */ text, /** @type {string} */ title) =>
    h("th", { scope: "col", class: id === "tried" ? null : "tf-right", "aria-sort": order === id ? "ascending" : null }, h("button", { class: "tf-sort", title, onclick: () => sort(id), "data-testid": `tf-board-sort-${id}` }, text, order === id ? " ▾" : ""));
  return h(
    "table",
    { class: "tf-table tf-board-table", "data-testid": "tf-board-table" },
    h(
      "thead",
      null,
      h(
        "tr",
        null,
        h("th", { scope: "col" }, h("abbr", { title: "mark two to compare them" }, "⇆")),
        sorted("tried", "configuration", "in the order in which they were tried"),
        sorted("step", "step", `of ${board.device}, and beside the captured program's of the same kind; ≈ modelled, ◍ predicted, ● measured. Fastest first`),
        h("th", { scope: "col", class: "tf-right" }, h("abbr", { title: "as it was timed, with its 95 % interval, and beside the captured program as that was timed" }, "measured")),
        sorted("peak", "peak", "the most bytes alive at once, static. Least first"),
        h("th", { scope: "col", class: "tf-right" }, "tried"),
      ),
    ),
    h("tbody", null, rows.map((row) => line(row, board, several, { isMarked: marked.includes(idOf(row)), isLive, isReachable: isReachable(row) }, open, mark))),
  );
}

/** What tells a row from all others. @param {Pick<BoardRow, "capture" | "config">} row */
export const idOf = ({ capture, config }) => `${capture} ${JSON.stringify(config)}`;

/** @param {BoardRow} row @param {BoardState} board @param {boolean} several @param {{ isMarked: boolean, isLive: boolean, isReachable: boolean }} is @param {(row: BoardRow) => void} open @param {(row: BoardRow) => void} mark */
function line(row, board, several, { isMarked, isLive, isReachable }, open, mark) {
  const whose = several ? h("span", { class: "tf-badge tf-whose" }, board.captures[row.capture]) : null;
  const isElsewhere = row.device !== board.device;
  return h(
    "tr",
    { class: row.is_shown ? "tf-current" : null, "aria-current": row.is_shown ? "true" : null, "data-name": row.name },
    h("td", null, h("input", { type: "checkbox", checked: isMarked, disabled: !isLive, title: isLive ? null : NEEDS_KERNEL, onchange: () => mark(row), "aria-label": `compare ${row.name}`, "data-board": idOf(row) })),
    h(
      "th",
      { scope: "row" },
      h(
        "div",
        { class: "tf-board-cell" },
        h("button", { class: "tf-board-name", "aria-disabled": String(!isReachable), title: isReachable ? `show it: ${row.call}` : NEEDS_KERNEL, onclick: () => isReachable && open(row), "data-testid": `tf-board-${row.capture}-${row.name}` }, row.name),
        whose,
        row.is_best && h("abbr", { class: "tf-best", title: "on the frontier: nothing found is better in both time and memory" }, "◆"),
      ),
    ),
    h("td", { class: `tf-right${row.kind === "measured" ? "" : " tf-hatched"}`, title: isElsewhere ? `${row.kind} of ${row.device}, not of ${board.device}: show it to have its time` : row.kind }, h("span", { "aria-hidden": "true" }, KINDS[row.kind][0]), ` ${formatTime(row.step_us)}`, isElsewhere && h("small", { class: "tf-note" }, ` ${row.device}`), row.ratio_kind && difference(row, row.ratio, `${row.ratio_kind}, both on ${row.device}`)),
    h("td", { class: "tf-right" }, measured(row)),
    h("td", { class: "tf-right" }, formatBytes(row.peak_bytes)),
    h("td", { class: "tf-right", title: new Date(1000 * row.tried_at).toLocaleString() }, clock(row.tried_at)),
  );
}

/** @param {BoardRow} row */
function measured(row) {
  const { measured: step, forecast_us: forecast, kind } = row;
  if (!step) return h("span", { class: "tf-note" }, "—");
  const wasPredicted = forecast !== null && kind === "measured" ? `; predicted before: ${formatTime(forecast)}` : "";
  return h("span", { title: `${step.where}${wasPredicted}` }, `${figure(step.median)} ms `, h("small", { class: "tf-note" }, bounds(step, figure)), difference(row, step.ratio, step.ratio_how));
}

/** Beside the captured program, in figures. @param {BoardRow} row @param {number | null} ratio @param {string} how */
function difference({ is_captured: isCaptured }, ratio, how) {
  if (isCaptured || ratio === null) return null;
  const percent = Math.round(100 * (ratio - 1));
  const text = percent === 0 ? "±0 %" : `${percent < 0 ? "−" : "+"}${Math.abs(percent)} %`;
  return h("span", { class: `tf-beside${percent < 0 ? " tf-gain" : percent > 0 ? " tf-cost" : ""}`, title: `beside the captured program: ${how}` }, text);
}

/** The time of day; of another day its date too. @param {number} seconds */
function clock(seconds) {
  const then = new Date(1000 * seconds);
  const time = then.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false });
  return then.toDateString() === new Date().toDateString() ? time : `${then.toLocaleDateString([], { month: "short", day: "numeric" })} ${time}`;
}
