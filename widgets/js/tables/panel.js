// The Timing tab and the Notes tab, which are plain tables.

import { bounds, figure, h } from "../parts/dom.js";
import { ratio, toMeasure } from "../parts/widgets.js";

const NOT_YET = "Not measured yet. Measuring replays the recorded traces; your code is not run again.";
const SHOWN = "optimised";

/** @param {Payload} payload @param {Status} status @param {boolean} live */
function timingTable(payload, status, live) {
  const { timing } = payload;
  const error = status.error?.panel === "timing" ? status.error.message : null;
  const alert = error && h("p", { class: "tf-error", role: "alert", "data-testid": "tf-error-timing" }, error);
  if (!timing) return h("div", null, alert, h("p", { class: "tf-note" }, payload.blocked ?? (live ? NOT_YET : `Not measured. ${toMeasure(live)}`)));
  // Those that were timed: what is pinned now may be something else.
  const was = timing.is_pinned ? "pinned" : "as captured";
  const scale = Math.max(...timing.rows.flatMap((row) => [row.baseline_ms?.high ?? 0, row.variant_ms?.high ?? 0])) || 1;
  const shown = timing.rows.filter((row) => row.program === SHOWN);
  const others = [...new Set(timing.rows.map((row) => row.program))].filter((name) => name !== SHOWN);
  return h(
    "div",
    { class: timing.stale ? "tf-stale" : "" },
    alert,
    timing.stale && h("p", { class: "tf-warn" }, `These times are of ${timing.config}. ${toMeasure(live)}`),
    h(
      "table",
      { class: "tf-table tf-timing", "data-testid": "tf-timing" },
      head(["part", was, "optimised", "compared", `optimised / ${was.replace("as ", "")}`, ...others], [1, 2]),
      h("tbody", null, shown.map((row) => timingRow(row, scale, payload, others))),
    ),
    h("p", { class: "tf-note" }, `${timing.provenance}. Times: median in ms, with a 95 % interval. Ratios: with a 99 % interval; within 1 % of 1 no difference is claimed. Bars share one scale.`),
    !payload.runs_triton && payload.summary.kernels.unique > 0 && h("p", { class: "tf-note" }, "Triton kernels did not run: CPU. Both programs ran ATen operators."),
    timing.work.length > 0 && workTable(timing.work),
    timing.notes.map((text) => h("p", { class: "tf-note" }, text)),
  );
}

/** Kernels, regions and the whole step, so that they can be added up. @param {Timing["work"]} work */
function workTable(work) {
  const row = (/** @type {Timing["work"][number]} */ one) => h("tr", null, h("th", { scope: "row" }, one.label), h("td", { class: "tf-right" }, one.calls ?? ""), h("td", { class: "tf-right" }, figure(one.us)), h("td", null, one.note));
  return h("table", { class: "tf-table", "data-testid": "tf-work" }, head(["part of the optimised step", "calls", "µs", ""], [1, 2]), h("tbody", null, work.map(row)));
}

/** @param {TimingRow} row @param {number} scale @param {Payload} payload @param {string[]} others programs that were timed beside it */
function timingRow(row, scale, payload, others) {
  const beside = others.map((name) => payload.timing?.rows.find((one) => one.program === name && one.phase === row.phase));
  return h(
    "tr",
    null,
    h("th", { scope: "row" }, row.label),
    h("td", { class: "tf-right" }, interval(row.baseline_ms)),
    h("td", { class: "tf-right" }, interval(row.variant_ms)),
    h("td", { class: "tf-bars" }, bar(row.baseline_ms, scale, "was"), bar(row.variant_ms, scale, "is")),
    h("td", null, ratio(row, payload)),
    beside.map((one) => h("td", null, interval(one?.variant_ms ?? null), " ", one && ratio(one, payload))),
  );
}

/** @param {Interval | null} time */
function interval(time) {
  if (!time) return h("span", { class: "tf-note" }, "not measured");
  return h("span", null, figure(time.median), h("small", { class: "tf-note" }, ` ${bounds(time, figure)}`));
}

/** @param {Interval | null} time @param {number} scale @param {string} kind */
function bar(time, scale, kind) {
  if (!time) return null;
  const whisker = h("i", { hidden: time.samples === 1 });
  whisker.style.left = `${(100 * time.low) / scale}%`;
  whisker.style.width = `${(100 * (time.high - time.low)) / scale}%`;
  const fill = h("b", null);
  fill.style.width = `${(100 * time.median) / scale}%`;
  return h("div", { class: `tf-bar tf-bar-${kind}`, "aria-hidden": "true" }, fill, whisker);
}

/** @param {string[]} titles @param {number[]} right columns aligned to the right */
function head(titles, right) {
  return h("thead", null, h("tr", null, titles.map((title, i) => h("th", { scope: "col", class: right.includes(i) ? "tf-right" : null }, title))));
}

/** @param {Payload} payload */
function notesTable(payload) {
  const environment = Object.entries(payload.environment);
  return h(
    "div",
    { class: "tf-notes", "data-testid": "tf-notes" },
    payload.notes.length === 0 && h("p", { class: "tf-note" }, "No guards: nothing that the program read back to Python is baked into the trace."),
    payload.notes.length > 0 && h("ul", null, payload.notes.map((note) => h("li", { class: `tf-${note.kind}` }, note.text))),
    environment.length > 0 && h("dl", null, environment.flatMap(([name, value]) => [h("dt", null, name), h("dd", null, value)])),
  );
}

/** A tab whose content is made anew whenever it is drawn. */
class TablePanel {
  /** @param {(view: View) => HTMLElement} content */
  constructor(content) {
    this.content = content;
    this.element = h("div", { class: "tf-table-panel", tabindex: "0" });
  }

  /** @param {View} view */
  draw(view) {
    this.element.replaceChildren(this.content(view));
  }

  mark() {}
}

export const timingPanel = () => new TablePanel((view) => timingTable(view.payload, view.status, view.live));
export const notesPanel = () => new TablePanel((view) => notesTable(view.payload));
