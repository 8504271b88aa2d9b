// The tabs that are tables: timing, kernels, notes.

import { figure, formatBytes, h } from "./dom.js";
import { copy } from "./passes.js";
import { ratio } from "./verdict.js";

const NOT_YET = "Not measured yet. Measuring replays the recorded traces; your code is not run again.";
const IN_A_NOTEBOOK = "Run the cell in a notebook to measure these passes.";

/** @param {Payload} payload @param {Status} status @param {boolean} live */
function timingTable(payload, status, live) {
  const { timing } = payload;
  const error = status.error?.panel === "timing" ? status.error.message : null;
  const alert = error && h("p", { class: "tf-error", role: "alert", "data-testid": "tf-error-timing" }, error);
  if (!timing) return h("div", null, alert, h("p", { class: "tf-note" }, payload.blocked ?? (live ? NOT_YET : `Not measured. ${IN_A_NOTEBOOK}`)));
  const scale = Math.max(...timing.rows.flatMap((row) => [row.baseline_ms?.high ?? 0, row.variant_ms?.high ?? 0])) || 1;
  return h(
    "div",
    { class: timing.stale ? "tf-stale" : "" },
    alert,
    timing.stale && h("p", { class: "tf-warn" }, `These times are of ${timing.config}. ${live ? "Measure again for the passes chosen now." : IN_A_NOTEBOOK}`),
    h(
      "table",
      { class: "tf-table tf-timing", "data-testid": "tf-timing" },
      head(["", "as captured", "optimised", "", "optimised / captured"], [1, 2]),
      h("tbody", null, timing.rows.map((row) => timingRow(row, scale))),
    ),
    h("p", { class: "tf-note" }, `${timing.provenance}. Median in ms, with its 95 % interval; bars share one scale.`),
    !payload.runs_triton && payload.kernels.length > 0 && h("p", { class: "tf-note" }, "Triton kernels did not run: CPU. Both programs ran ATen operators."),
    timing.notes.map((text) => h("p", { class: "tf-note" }, text)),
  );
}

/** @param {TimingRow} row @param {number} scale */
function timingRow(row, scale) {
  return h(
    "tr",
    null,
    h("th", { scope: "row" }, row.label),
    h("td", { class: "tf-right" }, interval(row.baseline_ms)),
    h("td", { class: "tf-right" }, interval(row.variant_ms)),
    h("td", { class: "tf-bars" }, bar(row.baseline_ms, scale, "was"), bar(row.variant_ms, scale, "is")),
    h("td", null, ratio(row)),
  );
}

/** @param {Interval | null} time */
function interval(time) {
  if (!time) return h("span", { class: "tf-note" }, "not measured");
  return h("span", null, figure(time.median), h("small", { class: "tf-note" }, ` ${figure(time.low)}–${figure(time.high)}`));
}

/** @param {Interval | null} time @param {number} scale @param {string} kind */
function bar(time, scale, kind) {
  if (!time) return null;
  const whisker = h("i", null);
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

/** @param {Payload} payload @param {Set<string>} open names of the kernels whose source is unfolded */
function kernelTable(payload, open) {
  if (payload.kernels.length === 0) {
    return h("p", { class: "tf-note" }, payload.config.fuse ? "No region of this trace became a Triton kernel; the decisions of `fuse` say why." : "Switch `fuse` on to turn regions into Triton kernels.");
  }
  const timed = payload.kernels.find((kernel) => kernel.time_us !== null);
  const untimed = payload.runs_triton ? "No times of single kernels: press Measure." : "No times: a CPU never runs Triton kernels, it runs their ATen operators. Bytes are of one launch.";
  return h(
    "div",
    null,
    h(
      "table",
      { class: "tf-table", "data-testid": "tf-kernels" },
      head(["kernel", "launches", "reads", "writes", "time of one", "operators"], [1, 2, 3, 4]),
      h("tbody", null, payload.kernels.flatMap((kernel) => kernelRows(kernel, open))),
    ),
    h("p", { class: "tf-note" }, !timed ? untimed : `Times: ${timed.provenance}, the mean over a kernel's launches. Bytes are of one launch.`),
  );
}

/** @param {KernelRecord} kernel @param {Set<string>} open */
function kernelRows(kernel, open) {
  const source = h("tr", { class: "tf-kernel-source", hidden: !open.has(kernel.name) }, h("td", { colspan: 6 }, sourceBlock(kernel)));
  const button = h("button", { class: "tf-disclose", "aria-expanded": String(open.has(kernel.name)), "data-testid": `tf-kernel-${kernel.name}` }, kernel.name);
  button.onclick = () => {
    source.hidden = !source.hidden;
    button.setAttribute("aria-expanded", String(!source.hidden));
    source.hidden ? open.delete(kernel.name) : open.add(kernel.name);
  };
  const time = kernel.time_us === null ? "" : `${figure(kernel.time_us)} µs`;
  const row = h(
    "tr",
    null,
    h("th", { scope: "row" }, button),
    h("td", { class: "tf-right" }, kernel.calls),
    h("td", { class: "tf-right" }, formatBytes(kernel.nbytes_read)),
    h("td", { class: "tf-right" }, formatBytes(kernel.nbytes_written)),
    h("td", { class: "tf-right" }, time),
    h("td", { class: "tf-ops", title: kernel.ops.join(" ") }, kernel.ops.join(" ")),
  );
  return [row, source];
}

/** @param {KernelRecord} kernel */
function sourceBlock(kernel) {
  const button = h("button", { class: "tf-chip tf-copy" }, "copy");
  button.onclick = () => copy(kernel.source, button);
  return h("div", { class: "tf-block" }, button, h("pre", { tabindex: "0", "data-testid": "tf-kernel-text" }, kernel.source));
}

/** @param {Payload} payload */
function notesTable(payload) {
  const environment = Object.entries(payload.environment);
  return h(
    "div",
    { class: "tf-notes", "data-testid": "tf-notes" },
    payload.notes.length === 0 && h("p", { class: "tf-note" }, "No guards: nothing that the cell read back to Python is baked into the trace."),
    payload.notes.length > 0 && h("ul", null, payload.notes.map((note) => h("li", { class: `tf-${note.kind}` }, note.text))),
    environment.length > 0 && h("dl", null, environment.flatMap(([name, value]) => [h("dt", null, name), h("dd", null, value)])),
  );
}

/** A tab whose content is made anew whenever it is drawn. */
class TablePanel {
  /** @param {(view: View) => HTMLElement} content */
  constructor(content) {
    this.content = content;
    this.element = h("div", { class: "tf-table-panel" });
  }

  /** @param {View} view */
  draw(view) {
    this.element.replaceChildren(this.content(view));
  }

  mark() {}
}

export const timingPanel = () => new TablePanel((view) => timingTable(view.payload, view.status, view.live));
/** @param {Act} _ @param {Open} open */
export const kernelPanel = (_, open) => new TablePanel((view) => kernelTable(view.payload, open.kernels));
export const notesPanel = () => new TablePanel((view) => notesTable(view.payload));
