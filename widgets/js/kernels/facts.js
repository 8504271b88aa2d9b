// Facts about one Triton kernel, for the table and for the details: its source, its bandwidth, the resources of one program.

import { figure, formatBytes, h, plural } from "../parts/dom.js";
import { tokens } from "../parts/highlight.js";
import { copyButton, NEEDS_KERNEL } from "../parts/widgets.js";

/** @param {KernelRecord} kernel */
export function sourceBlock(kernel) {
  const text = tokens(kernel.source).map(({ kind, text }) => (kind && kind !== "name" ? h("span", { class: `tf-${kind}` }, text) : text));
  return h("div", { class: "tf-block" }, copyButton(kernel.source, "tf-copy"), h("pre", { tabindex: "0", "aria-label": `source of ${kernel.name}`, "data-testid": "tf-kernel-text" }, text));
}

/** What a kernel reaches of its nearest roof. @typedef {Pick<KernelRecord, "gb_per_s" | "tflop_per_s" | "peak_share" | "peak_source" | "bound">} Speed */

/** In the unit of the roof that is nearest. @param {Speed} of */
export function speed({ gb_per_s: rate, tflop_per_s: arithmetic, bound }) {
  if (bound === "compute" && arithmetic !== null) return `${figure(arithmetic)} TFLOP/s`;
  return rate === null ? null : `${figure(rate)} GB/s`;
}

/** Its speed, the share of the peak and whose peak, and what binds it. @param {Speed} kernel */
export function bandwidth(kernel) {
  const { peak_share: share, peak_source: source, bound } = kernel;
  if (kernel.gb_per_s === null) return h("span", { class: "tf-note" }, "unknown without its time");
  return h("span", null, speed(kernel), share !== null && h("span", null, `, ${percent(share)} `, h("span", { class: "tf-note" }, `of ${source}`)), bound && " ", bound && h("span", { class: "tf-badge" }, bound === "launch" ? "launch bound" : `${bound} bound`));
}

/** Of a measured peak there can be more than all: see `AT_PEAK` of tracefuse.timeline.kernel_times. @param {number} share */
export function percent(share) {
  const whole = Math.round(100 * share);
  return whole > 100 ? "at peak" : `${whole} %`;
}

/** Registers, shared memory and spills, or the button that asks for them. @param {KernelRecord} kernel @param {View} view @param {Act} act */
export function resources({ name, resources: known }, { status, live, payload }, act) {
  const error = status.error?.panel === "kernels" && status.error.at === name ? h("span", { class: "tf-error", role: "alert" }, status.error.message) : null;
  if (known) {
    const spills = known.spills > 0 ? h("span", { class: "tf-cost" }, `▲ ${plural(known.spills, "spill")}`) : "no spills";
    return h("span", { title: `compiled for ${known.target}` }, `${known.registers} registers, ${formatBytes(known.shared_bytes)} shared, `, spills, h("span", { class: "tf-note" }, ` ${known.target}`));
  }
  const title = live ? "compile it for its registers, shared memory and spills" : NEEDS_KERNEL;
  const isFree = live && status.busy === "" && payload.blocked === null;
  return h("span", null, h("button", { class: "tf-chip", disabled: !isFree, title, onclick: () => act.ask("kernels", { type: "inspect", kernel: name }), "data-testid": `tf-inspect-${name}` }, "inspect"), error);
}
