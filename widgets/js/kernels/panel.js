// The Kernels tab: every kernel and library call of the step, beside what it stands for; unfolded, its parts, its source, its values.

import { formatBytes, formatTime, h, plural } from "../parts/dom.js";
import { chip, percent as shareOf } from "../parts/widgets.js";
import { bandwidth, percent, resources, sourceBlock } from "./facts.js";
import { computedBy, rowsOf, sorted } from "./rows.js";

/** @typedef {import("./rows.js").Row} Row @typedef {import("./rows.js").KernelKey} KernelKey */

const SHOWN_CALLS = 24;
/** A ratio this near to 1 is neither faster nor slower. */
const SAME = 0.02;
/** Title, what it is sorted by, what it says; columns of words have `isText`. */
const COLUMNS = /** @type {[string, KernelKey | "", string, boolean?][]} */ ([
  ["kernel or library call", "name", "Triton's kernels, and the operators that a library computes: together they are the step", true],
  ["calls", "calls", "in one step"],
  ["step", "time", "time of all its calls in a step"],
  ["of step", "", "its share of what all kernels of the step take"],
  ["one", "", "mean time of one call"],
  ["moves", "bytes", "bytes that one call reads and writes; sorted by those of a step"],
  ["bound", "", "the nearest roof: memory, compute, or launch; with the measured share of it that is reached", true],
  ["stands for", "", "the single ops that all its calls replace, and what those take one by one", true],
  ["gain", "gain", "the time of the ops that it stands for, over its own; below 1 it is slower than they are"],
]);

/** @implements {Panel} */
export class KernelPanel {
  /** @param {Act} act @param {Open} open */
  constructor(act, open) {
    this.act = act;
    this.open = open;
    /** @type {KernelKey} */
    this.key = "time";
    this.ascending = false;
    this.element = h("div", { class: "tf-table-panel tf-kernel-panel" });
    /** @type {Map<string, string[]>} */
    this.calls = new Map();
    /** @type {View | null} */
    this.view = null;
  }

  /** @param {View} view */
  draw(view) {
    if (view.payload !== this.view?.payload) this.calls = computedBy(view.payload.values);
    this.view = view;
    this.element.replaceChildren(...this.content(view));
    this.mark(view);
  }

  /** @param {View} view */
  mark(view) {
    const { selected, matches, payload } = view;
    const name = payload.values[selected]?.kernel;
    for (const row of /** @type {NodeListOf<HTMLElement>} */ (this.element.querySelectorAll("[data-kernel-row]"))) {
      const values = row.dataset.values?.split(" ") ?? this.calls.get(row.dataset.kernelRow ?? "") ?? [];
      row.classList.toggle("tf-current", selected !== "" && (row.dataset.kernelRow === name || values.includes(selected)));
      row.classList.toggle("tf-hit-row", matches !== null && values.some((one) => matches.has(one)));
    }
  }

  /** @param {View} view */
  content(view) {
    const { payload, status } = view;
    const { kernels, config, clock } = payload;
    const problem = status.error;
    const isOfRow = kernels.some(({ name }) => name === problem?.at);
    const error = problem?.panel === "kernels" && !isOfRow && h("p", { class: "tf-error", role: "alert", "data-testid": "tf-error-kernels" }, problem.message);
    const none = config.fuse ? "No region of this trace became a Triton kernel; the decisions of the pass fuse say why." : "Switch fuse on to turn regions into Triton kernels.";
    const rows = sorted(rowsOf(payload), this.key, this.ascending);
    const peak = kernels.find((kernel) => kernel.peak_source)?.peak_source ?? payload.aten.find((one) => one.peak_source)?.peak_source;
    const ran = runsKernels(payload) ? "" : " A CPU runs a kernel's operators in its place: that is the time which is shown.";
    return [
      ...(error ? [error] : []),
      ...(kernels.length === 0 ? [h("p", { class: "tf-note" }, none)] : []),
      h("table", { class: "tf-table tf-kernels", "data-testid": "tf-kernels" }, this.head(), h("tbody", null, rows.flatMap((row) => this.rows(row, view))), total(rows, clock)),
      h("p", { class: "tf-note" }, `Times ${clock.provenance[1]}.${ran}${peak ? ` Peak: ${peak}; matmuls beside those of their precision.` : ""}`),
    ];
  }

  head() {
    return h(
      "thead",
      null,
      h("tr", null, COLUMNS.map(([label, key, title, isText]) => {
        const isKey = key !== "" && key === this.key;
        const sort = isKey ? (this.ascending ? "ascending" : "descending") : key ? "none" : null;
        const glyph = isKey ? (this.ascending ? " ↑" : " ↓") : "";
        const content = key ? h("button", { class: "tf-sort", onclick: () => this.sort(key), "data-testid": `tf-sort-${key}` }, label + glyph) : label;
        return h("th", { scope: "col", "aria-sort": sort, title, class: isText ? null : "tf-right" }, content);
      })),
    );
  }

  /** Another click turns the order round. @param {KernelKey} key */
  sort(key) {
    this.ascending = this.key === key ? !this.ascending : key === "name" || key === "gain";
    this.key = key;
    if (!this.view) return;
    this.draw(this.view);
    /** @type {HTMLElement | null} */ (this.element.querySelector(`[data-testid="tf-sort-${key}"]`))?.focus();
  }

  /** @param {Row} row @param {View} view */
  rows(row, view) {
    const { kernels: open } = this.open;
    const { id, kernel, library, said } = row;
    const cell = h("td", { colspan: String(COLUMNS.length) });
    const more = h("tr", { class: "tf-kernel-source", hidden: !open.has(id) }, cell);
    const fill = () => cell.firstChild || cell.append(...(kernel ? this.ofKernel(kernel, view) : library ? this.ofLibrary(library) : []));
    if (!more.hidden) fill();
    const button = h("button", { class: "tf-disclose", "aria-expanded": String(!more.hidden), title: `${said}\n${kernel?.name ?? library?.name}`, "data-testid": `tf-kernel-${id}` }, said);
    button.onclick = () => {
      more.hidden = !more.hidden;
      button.setAttribute("aria-expanded", String(!more.hidden));
      more.hidden ? open.delete(id) : open.add(id);
      fill();
    };
    const attributes = { "data-kernel-row": id, ...(library ? { "data-values": library.values.join(" ") } : {}), class: kernel ? null : "tf-library" };
    return [h("tr", attributes, h("th", { scope: "row" }, button), ...figures(row, view.payload)), more];
  }

  /** @param {KernelRecord} kernel @param {View} view */
  ofKernel(kernel, view) {
    const calls = this.calls.get(kernel.name) ?? [];
    const left = calls.length - SHOWN_CALLS;
    const guess = kernel.blocks === "guess";
    return [
      line("Triton kernel", h("code", null, kernel.name), h("span", { class: `tf-badge${guess ? " tf-removed" : ""}`, title: guess ? "nothing else was tried: measure with tune=True" : "the best of those that were tried" }, `block sizes: ${kernel.blocks}`)),
      ...replaces(kernel),
      line("operators", h("code", null, kernel.ops.join(" "))),
      line("one launch", `reads ${formatBytes(kernel.nbytes_read)}, writes ${formatBytes(kernel.nbytes_written)}`, bandwidth(kernel)),
      line("per program", resources(kernel, view, this.act)),
      line("computes", ...calls.slice(0, SHOWN_CALLS).map((name) => chip(name, this.act)), left > 0 && `+${left}`),
      sourceBlock(kernel),
    ];
  }

  /** @param {AtenRecord} one */
  ofLibrary(one) {
    const left = one.calls - one.values.length;
    return [
      line("operator", h("code", null, one.name || "those that take next to nothing, together")),
      line("one call", bandwidth(one)),
      ...(one.values.length > 0 ? [line("computes", ...one.values.map((name) => chip(name, this.act)), left > 0 && `+${left}`)] : []),
    ];
  }
}

/** @param {string} label @param {...(Node | string | false)} content */
const line = (label, ...content) => h("div", { class: "tf-fact" }, h("span", { class: "tf-label" }, label), h("span", { class: "tf-chips" }, ...content));

/** What the kernel's calls did away with. @param {KernelRecord} kernel */
function replaces({ replaces: found, calls, time_us: us, nbytes_read: read, nbytes_written: written }) {
  if (!found) return [];
  const kinds = found.ops.map(([name, count]) => (count > 1 ? `${name} ×${count}` : name)).join(", ");
  const again = found.again > 0 ? ` It computes ${plural(found.again, "op")} again beside these, which remat put there.` : "";
  const bytes = `${formatBytes(found.nbytes)} → ${formatBytes(calls * (read + written))}`;
  const times = us && found.us ? `, ${formatTime(found.us)} one by one → ${formatTime(us * calls)}` : "";
  return [line("stands for", kinds), line("in all", `${plural(found.launches, "captured op")} → ${plural(calls, "launch", "launches")}${times}; ${bytes} through memory.${again}`)];
}

/** @param {Node | string | number} content @param {string} [more] classes */
const right = (content, more = "") => h("td", { class: `tf-right${more}` }, content);
const time = (/** @type {number | null} */ us) => (us === null ? unknown() : formatTime(us));

/** Whether the times are those of Triton's kernels: a CPU runs their operators, one by one, which is no gain and no loss. @param {Payload} payload */
const runsKernels = ({ runs_triton: runsTriton, clock }) => runsTriton || clock.chosen !== "here";

/** @param {Row} row @param {Payload} payload */
function figures({ calls, nbytes, us, step, kind, bound, share, gain, kernel }, payload) {
  const { clock } = payload;
  const hatched = kind === "predicted" ? " tf-hatched" : "";
  const found = kernel?.replaces;
  return [
    right(calls),
    right(time(step), hatched),
    right(step === null ? "" : shareOf(step, clock.step_us[1])),
    right(time(us), hatched),
    right(formatBytes(nbytes)),
    h("td", null, bound ? `${bound}${share === null ? "" : ` ${percent(share)}`}` : unknown()),
    h("td", { class: "tf-instead", title: found ? found.ops.map(([name, count]) => `${name} ×${count}`).join(", ") : null }, found ? plural(found.launches, "op") + (found.us ? `, ${formatTime(found.us)}` : "") : ""),
    right(gain === null || !runsKernels(payload) ? "" : ratioOf(gain)),
  ];
}

/** @param {number} gain */
function ratioOf(gain) {
  const mood = gain > 1 + SAME ? "better" : gain < 1 - SAME ? "worse" : "same";
  const title = `${{ worse: "slower than", better: "faster than", same: "as fast as" }[mood]} the ops that it stands for`;
  return h("span", { class: `tf-pill tf-${mood}`, title }, `${mood === "worse" ? "▼ " : ""}${gain.toFixed(2)}×`);
}

/** @param {Row[]} rows @param {Clock} clock */
function total(rows, clock) {
  const step = rows.reduce((sum, one) => sum + (one.step ?? 0), 0);
  const calls = rows.reduce((sum, one) => sum + one.calls, 0);
  return h("tfoot", null, h("tr", { "data-testid": "tf-kernels-total" }, h("th", { scope: "row", title: "what all kernels of the step take" }, "all kernels"), right(calls), right(formatTime(step)), right(shareOf(step, clock.step_us[1])), h("td", { colspan: "5" })));
}

function unknown() {
  return h("span", { class: "tf-note", title: "unknown without its time" }, "—");
}
