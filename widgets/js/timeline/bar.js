// The elements of the Timeline tab, and the line above it: where its times come from, and its buttons.

import { h } from "../parts/dom.js";
import { toMeasure } from "../parts/widgets.js";

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

/** @param {View} view @param {boolean} isMeasured @param {(wantsModelled: boolean) => void} choose */
export function origin({ timeline, payload, live }, isMeasured, choose) {
  // A run of the user's own has no trace, whose ops could be laid end to end.
  if (payload.times === null) return [h("span", { class: "tf-note tf-timeline-said", "data-testid": "tf-timeline-said" }, timeline?.provenance)];
  const { before, after } = payload.times;
  const isModelled = after.startsWith("modelled");
  const scaled = timeline?.programs.some(({ config }) => payload.clock.replays[config]) ? ", scaled to the measured step" : "";
  const times = (before === after ? before : `${before}; ${after}`).replace(/^modelled: /, "");
  const remedy = payload.blocked ?? (live ? "Press Measure for a timeline." : "Run its cell and press Measure for a timeline.");
  const all = isMeasured ? `${timeline?.provenance}${scaled}` : `${times}; ops end to end.${timeline ? "" : ` ${remedy}`}`;
  // What models is said in the list of times.
  const said = !isMeasured && isModelled && before === after ? all.slice(times.length + 2) : all;
  const badge = isMeasured ? [] : [h("span", { class: "tf-badge" }, isModelled ? "modelled" : after.startsWith("predicted") ? "predicted" : "end to end")];
  return [...badge, h("span", { class: "tf-note tf-timeline-said", "data-testid": "tf-timeline-said", title: all }, said), ...(timeline ? [sources(isMeasured, choose)] : [])];
}

/** @param {boolean} isMeasured @param {(wantsModelled: boolean) => void} choose */
function sources(isMeasured, choose) {
  const select = h(
    "select",
    { class: "tf-chip", "aria-label": "Which times", "data-testid": "tf-timeline-source" },
    h("option", { value: "measured" }, "as measured"),
    h("option", { value: "modelled" }, "ops end to end"),
  );
  select.value = isMeasured ? "measured" : "modelled";
  select.onchange = () => choose(select.value === "modelled");
  return select;
}

/** @param {Record<"measure" | "out" | "in" | "all", () => void>} actions @param {boolean} measuring */
export function controls(actions, measuring) {
  const button = (/** @type {keyof typeof actions} */ id, /** @type {string} */ text, /** @type {string} */ title, /** @type {Record<string, string>} */ more) =>
    h("button", { class: "tf-chip", title, onclick: actions[id], "data-testid": `tf-timeline-${id}`, ...more }, text);
  return h(
    "span",
    { class: "tf-timeline-buttons" },
    button("measure", "⟷ range", "Dragging measures a range, as it does with Shift", { "aria-pressed": String(measuring) }),
    button("out", "−", "Zoom out", { "aria-label": "zoom out" }),
    button("in", "+", "Zoom in", { "aria-label": "zoom in" }),
    button("all", "all", "The whole time axis", {}),
  );
}

/** @param {View} view */
export function staleness({ timeline, live }) {
  return h(
    "p",
    { class: "tf-warn", "data-testid": "tf-timeline-stale" },
    `This timeline is of ${timeline?.programs.at(-1)?.config}. ${toMeasure(live)} Memory is that of the passes chosen now, so it is left out where the ops differ.`,
  );
}
