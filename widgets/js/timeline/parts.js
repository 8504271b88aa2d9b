// What the timeline tab is made of.

import { h } from "../parts/dom.js";

/** The elements of the timeline tab. */
export function parts() {
  const canvas = h("canvas", { tabindex: "0", role: "application", "aria-label": "Timeline; arrows walk lanes and events, ? lists the keys", "data-testid": "tf-timeline" });
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d", { alpha: false }));
  const tip = h("div", { class: "tf-tip", hidden: true, "data-testid": "tf-timeline-tip" });
  const stage = h("div", { class: "tf-stage" }, canvas, tip);
  const bar = h("div", { class: "tf-timeline-bar" });
  const strip = h("div", { class: "tf-timeline-strip", "data-testid": "tf-timeline-strip" });
  const spoken = h("div", { class: "tf-spoken", role: "status", "data-testid": "tf-timeline-spoken" });
  const alive = h("div", { class: "tf-alive-lists" });
  const saved = h("div", { "data-testid": "tf-saved" });
  const details = h("details", { class: "tf-timeline-more", "data-testid": "tf-alive" }, h("summary", null, "What is alive at the peak, and what is saved for the backward"), alive, saved);
  const idle = h("div", { class: "tf-range" });
  const gaps = h("details", { class: "tf-timeline-more", "data-testid": "tf-idle" }, h("summary", null), idle);
  const element = h("div", { class: "tf-timeline-panel" }, bar, stage, strip, gaps, details, spoken);
  return { canvas, context, tip, stage, bar, strip, spoken, alive, saved, details, idle, gaps, element };
}

/** Which events are of values that a search found. @param {import("./events.js").Program} program @param {Set<string>} matches */
export function isFound({ values, columns }, matches) {
  const isMatch = [false, ...values.map((value) => matches.has(value))];
  return Uint8Array.from(columns.value, (value) => Number(isMatch[value]));
}
