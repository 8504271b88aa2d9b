// The Kernels tab: the bytes, the time and the speed of each kernel; unfolded, its source and the values that it computes.

import { figure, formatBytes, formatTime, h } from "../parts/dom.js";
import { chip } from "../parts/widgets.js";
import { percent, resources, sourceBlock, speed } from "./facts.js";
import { computedBy, moved, sorted, stepTime } from "./rows.js";

const SHOWN_CALLS = 24;
// What tells kernels of one long name apart.
const HASH = 7;
const OF_PEAK = "the least time that its bound allows, over its time; at peak: as fast as the copy or the matmul that the peak was measured with, or faster, as where caches hold the operands";
const COLUMNS = /** @type {[string, import("./rows.js").KernelKey | "", string][]} */ ([
  ["kernel", "name", ""],
  ["launches", "calls", "in one step"],
  ["moves", "bytes", "bytes that one launch reads and writes; sorted by those of a step"],
  ["one", "", "mean time of one launch"],
  ["step", "time", "time of all launches of a step"],
  ["speed", "", "of moving its bytes or, where that is its bound, of its arithmetic"],
  ["of peak", "", OF_PEAK],
  ["bound", "", "the nearest roof: memory, compute, or launch where it is over before the next one can begin"],
  ["blocks", "", "tuned: the best block sizes of those that were tried; guess: none were"],
]);

/** @implements {Panel} */
export class KernelPanel {
  /** @param {Act} act @param {Open} open */
  constructor(act, open) {
    this.act = act;
    this.open = open;
    /** @type {import("./rows.js").KernelKey | ""} */
    this.key = "";
    this.ascending = false;
    this.element = h("div", { class: "tf-table-panel" });
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
    const name = view.payload.values[view.selected]?.kernel;
    for (const row of /** @type {NodeListOf<HTMLElement>} */ (this.element.querySelectorAll("[data-kernel-row]"))) row.classList.toggle("tf-current", row.dataset.kernelRow === name);
  }

  /** @param {View} view */
  content(view) {
    const { kernels, config, runs_triton: runsTriton } = view.payload;
    const { error: problem } = view.status;
    const isOfRow = kernels.some(({ name }) => name === problem?.at);
    const error = problem?.panel === "kernels" && !isOfRow && h("p", { class: "tf-error", role: "alert", "data-testid": "tf-error-kernels" }, problem.message);
    const none = config.fuse ? "No region of this trace became a Triton kernel; the decisions of the pass fuse say why." : "Switch fuse on to turn regions into Triton kernels.";
    if (kernels.length === 0) return [h("p", { class: "tf-note" }, none), ...atenTable(view.payload)];
    const timed = kernels.find((kernel) => kernel.time_us !== null);
    const untimed = runsTriton ? "No times of single kernels: press Measure." : "No times: a CPU never runs Triton kernels, it runs their ATen operators.";
    const peak = kernels.find((kernel) => kernel.peak_source)?.peak_source;
    const rows = this.key ? sorted(kernels, this.key, this.ascending) : kernels;
    return [
      ...(error ? [error] : []),
      h("div", { class: "tf-scroll" }, h("table", { class: "tf-table tf-kernels", "data-testid": "tf-kernels" }, this.head(), h("tbody", null, rows.flatMap((kernel) => this.rows(kernel, view))))),
      h("p", { class: "tf-note" }, timed ? `Times: ${timed.provenance}, the mean over a kernel's launches.${peak ? ` Peak: ${peak}.` : ""}` : untimed),
      ...atenTable(view.payload),
    ];
  }

  head() {
    return h(
      "thead",
      null,
      h("tr", null, COLUMNS.map(([label, key, title], at) => {
        const isKey = key !== "" && key === this.key;
        const sort = isKey ? (this.ascending ? "ascending" : "descending") : key ? "none" : null;
        const glyph = isKey ? (this.ascending ? " ↑" : " ↓") : "";
        const content = key ? h("button", { class: "tf-sort", onclick: () => this.sort(key), "data-testid": `tf-sort-${key}` }, label + glyph) : label;
        return h("th", { scope: "col", "aria-sort": sort, title: title || null, class: at > 0 && at < 7 ? "tf-right" : null }, content);
      })),
    );
  }

  /** Another click turns the order round. @param {import("./rows.js").KernelKey} key */
  sort(key) {
    this.ascending = this.key === key ? !this.ascending : key === "name";
    this.key = key;
    if (!this.view) return;
    this.draw(this.view);
    /** @type {HTMLElement | null} */ (this.element.querySelector(`[data-testid="tf-sort-${key}"]`))?.focus();
  }

  /** @param {KernelRecord} kernel @param {View} view */
  rows(kernel, view) {
    const { kernels: open } = this.open;
    const cell = h("td", { colspan: String(COLUMNS.length) });
    const more = h("tr", { class: "tf-kernel-source", hidden: !open.has(kernel.name) }, cell);
    const fill = () => cell.firstChild || cell.append(...this.more(kernel, view));
    if (!more.hidden) fill();
    const button = h("button", { class: "tf-disclose", "aria-expanded": String(!more.hidden), title: kernel.name, "data-testid": `tf-kernel-${kernel.name}` }, h("span", { class: "tf-stem" }, kernel.name.slice(0, -HASH)), kernel.name.slice(-HASH));
    button.onclick = () => {
      more.hidden = !more.hidden;
      button.setAttribute("aria-expanded", String(!more.hidden));
      more.hidden ? open.delete(kernel.name) : open.add(kernel.name);
      fill();
    };
    return [h("tr", { "data-kernel-row": kernel.name }, h("th", { scope: "row" }, button), ...figures(kernel)), more];
  }

  /** @param {KernelRecord} kernel @param {View} view */
  more(kernel, view) {
    const calls = this.calls.get(kernel.name) ?? [];
    const left = calls.length - SHOWN_CALLS;
    const line = (/** @type {string} */ label, /** @type {(Node | string | false)[]} */ ...content) => h("div", { class: "tf-fact" }, h("span", { class: "tf-label" }, label), h("span", { class: "tf-chips" }, ...content));
    return [
      line("operators", h("code", null, kernel.ops.join(" "))),
      line("one launch", `reads ${formatBytes(kernel.nbytes_read)}, writes ${formatBytes(kernel.nbytes_written)}`),
      line("per program", resources(kernel, view, this.act)),
      line("computes", ...calls.slice(0, SHOWN_CALLS).map((name) => chip(name, this.act)), left > 0 && `+${left}`),
      sourceBlock(kernel),
    ];
  }
}

/** @param {Node | string | number} content */
const right = (content) => h("td", { class: "tf-right" }, content);
const us = (/** @type {number | null} */ time) => (time === null ? unknown() : formatTime(time));

/** @param {KernelRecord | AtenRecord} kernel */
function reached(kernel) {
  const title = kernel.least_us === null ? null : `at least ${figure(kernel.least_us)} µs`;
  return [right(speed(kernel) ?? unknown()), right(kernel.peak_share === null ? unknown() : share(kernel.peak_share)), h("td", { title }, kernel.bound || unknown())];
}

/** ATen's operators, as far as they were measured. @param {Payload} payload */
function atenTable({ aten }) {
  if (aten.length === 0) return [];
  const [{ provenance, peak_source: peak }] = aten;
  const titles = ["ATen operator", "calls", "moves", "one", "step", "speed", "of peak", "bound"];
  const row = (/** @type {AtenRecord} */ one) =>
    h("tr", null, h("th", { scope: "row" }, one.name), right(one.calls), right(formatBytes(one.nbytes)), right(us(one.time_us)), right(us(one.time_us * one.calls)), ...reached(one));
  return [
    h("div", { class: "tf-scroll" }, h("table", { class: "tf-table tf-kernels", "data-testid": "tf-aten" }, h("thead", null, h("tr", null, titles.map((title, at) => h("th", { scope: "col", title: title === "of peak" ? OF_PEAK : null, class: at > 0 && at < 7 ? "tf-right" : null }, title)))), h("tbody", null, aten.map(row)))),
    h("p", { class: "tf-note" }, `Times: ${provenance}.${peak ? ` Peak: ${peak}; matmuls beside those of their precision.` : ""}`),
  ];
}

/** @param {KernelRecord} kernel */
function figures(kernel) {
  return [
    right(kernel.calls),
    right(formatBytes(moved(kernel))),
    right(us(kernel.time_us)),
    right(us(stepTime(kernel))),
    ...reached(kernel),
    h("td", null, h("span", { class: `tf-badge${kernel.blocks === "guess" ? " tf-removed" : ""}`, title: kernel.blocks === "guess" ? "nothing else was tried: measure with tune=True" : "the best of those that were tried" }, kernel.blocks)),
  ];
}

function unknown() {
  return h("span", { class: "tf-note", title: "unknown without its time" }, "—");
}

/** @param {number} part of 1 */
function share(part) {
  const fill = h("b", null);
  fill.style.width = `${Math.min(100, 100 * part)}%`;
  return h("span", { class: "tf-share" }, percent(part), h("span", { class: "tf-bar tf-bar-is", "aria-hidden": "true" }, fill));
}
