// The line above the timeline: where its times come from, and its buttons.

import { h } from "../parts/dom.js";

/** @param {View} view @param {boolean} isMeasured @param {(wantsModelled: boolean) => void} choose */
export function origin({ timeline, payload, live }, isMeasured, choose) {
  // A run of the user's own has no trace, whose ops could be laid end to end.
  if (payload.times === null) return [h("span", { class: "tf-note tf-timeline-said", "data-testid": "tf-timeline-said" }, timeline?.provenance)];
  const { before, after } = payload.times;
  const isModelled = after.startsWith("modelled");
  const times = (before === after ? before : `${before}; ${after}`).replace(/^modelled: /, "");
  const remedy = payload.blocked ?? (live ? "Press Measure for a timeline." : "Run the cell in a notebook and press Measure for a timeline.");
  const said = isMeasured ? timeline?.provenance : `${times}; ops end to end.${timeline ? "" : ` ${remedy}`}`;
  const badge = isMeasured ? [] : [h("span", { class: "tf-badge" }, isModelled ? "modelled" : "no timeline")];
  return [...badge, h("span", { class: "tf-note tf-timeline-said", "data-testid": "tf-timeline-said" }, said), ...(timeline ? [sources(isMeasured, choose)] : [])];
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
  const remedy = live ? "Measure again for the passes chosen now." : "Run the cell in a notebook to measure these passes.";
  return h(
    "p",
    { class: "tf-warn", "data-testid": "tf-timeline-stale" },
    `This timeline is of ${timeline?.programs.at(-1)?.config}. ${remedy} Memory is that of the passes chosen now, so it is left out where the ops differ.`,
  );
}
