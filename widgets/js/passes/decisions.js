// The work of one pass by itself: the program before and after it, and what it decided about which values.

import { formatBytes, formatSeconds, h, plural, signed } from "../parts/dom.js";
import { chip, NAMELESS } from "../parts/widgets.js";
import { signedBytes } from "./effects.js";

const SHOWN_VALUES = 8;
const SHOWN_REASONS = 40;

/** Every decision about a value, with the pass that made it. @param {string} name @param {Payload} payload @returns {[string, Decision][]} */
export function decisionsOn(name, { decisions }) {
  return Object.entries(decisions).flatMap(([pass, all]) => all.filter(({ values }) => values.includes(name)).map((decision) => /** @type {[string, Decision]} */ ([pass, decision])));
}

/** Sizes before and after this pass in a sentence. @param {PassRecord} one */
export function sentence(one) {
  if (!one.enabled) return one.state;
  if (one.error) return "failed, and left out";
  if (!one.changed) return "changed nothing";
  const [ops, saved, peak] = [one.ops, one.saved_bytes, one.peak_bytes].map((pair) => pair ?? [0, 0]);
  const parts = [
    `${ops[0]} → ${ops[1]} ops`,
    saved[0] !== saved[1] && `${signedBytes(saved[1] - saved[0])} saved`,
    peak[0] !== peak[1] && `${signedBytes(peak[1] - peak[0])} at the peak`,
  ];
  return parts.filter(Boolean).join(", ");
}

/** How many values were decided about. @param {Decision[]} decisions */
export function decided(decisions) {
  return decisions.reduce((sum, { values }) => sum + values.length, 0);
}

/** @param {PassRecord} one @param {View} view @param {Act} act */
export function passWork(one, { payload, selected }, act) {
  const decisions = payload.decisions[one.name];
  const left = decisions.length - SHOWN_REASONS;
  return h(
    "section",
    { "aria-label": `what ${one.name} did`, "data-testid": `tf-work-${one.name}` },
    h(
      "div",
      { class: "tf-facts" },
      h("b", { class: "tf-name" }, one.name),
      selected && chip(selected, act),
      h("button", { class: "tf-chip tf-close", "aria-label": "close", onclick: () => act.showPass("") }, "×"),
    ),
    h("p", { class: "tf-why" }, one.help),
    one.enabled && !one.error && sizes(one),
    one.enabled && !one.error && payload.update && one.peak_bytes && wholePeak(payload),
    one.seconds !== null && h("p", { class: "tf-note" }, `The pass itself took ${formatSeconds(one.seconds)}.`),
    one.error && h("p", { class: "tf-error" }, one.error),
    one.enabled && h("h4", null, decisions.length === 0 ? "No decisions" : plural(decided(decisions), "decision")),
    h("ul", { class: "tf-decisions" }, decisions.slice(0, SHOWN_REASONS).map((decision) => reason(decision, act))),
    left > 0 && h("p", { class: "tf-note" }, `and ${plural(left, "more reason")}: ${printing(one, payload)}`),
  );
}

/** Why the peaks of a pass and that of the step are two numbers. @param {Payload} payload */
function wholePeak({ summary: { peak_bytes: peak } }) {
  return h("p", { class: "tf-note" }, `Peaks here are of forward and backward; the whole step's is ${formatBytes(peak[1])}.`);
}

/** @param {PassRecord} one */
function sizes(one) {
  const rows = /** @type {[string, [number, number] | null, (n: number) => string, (n: number) => string][]} */ ([
    ["operators", one.ops, String, signed],
    ["saved", one.saved_bytes, formatBytes, signedBytes],
    ["static peak of forward and backward", one.peak_bytes, formatBytes, signedBytes],
  ]);
  return h(
    "table",
    { class: "tf-table tf-own" },
    h("thead", null, h("tr", null, ["alone", "before", "after", "Δ"].map((title, at) => h("th", { scope: "col", class: at > 0 ? "tf-right" : null }, title)))),
    h("tbody", null, rows.map(([label, pair, format, change]) => pair && ownRow(label, pair, format, change)).filter((row) => row !== null)),
  );
}

/** @param {string} label @param {[number, number]} pair @param {(n: number) => string} format @param {(n: number) => string} change */
function ownRow(label, [before, after], format, change) {
  const by = after - before;
  return h("tr", null, h("th", { scope: "row" }, label), h("td", { class: "tf-right" }, format(before)), h("td", { class: "tf-right" }, format(after)), h("td", { class: `tf-right ${by < 0 ? "tf-gain" : by > 0 ? "tf-cost" : "tf-note"}` }, by === 0 ? "·" : change(by)));
}

/** @param {Decision} decision @param {Act} act */
function reason(decision, act) {
  const { values } = decision;
  const more = values.length - SHOWN_VALUES;
  const chips = h("span", { class: "tf-chips" }, values.slice(0, SHOWN_VALUES).map((value) => chip(value, act)));
  if (more > 0) chips.append(moreButton(more, () => chips.replaceChildren(...values.map((value) => chip(value, act)))));
  return h(
    "li",
    null,
    h("span", { class: "tf-action" }, decision.action),
    decision.nbytes > 0 && h("span", { class: "tf-note" }, ` ${formatBytes(decision.nbytes)}`),
    h("span", { class: "tf-why" }, decision.reason),
    chips,
  );
}

/** @param {number} more @param {() => void} act */
function moreButton(more, act) {
  return h("button", { class: "tf-chip", onclick: act }, `+${more}`);
}

/** What prints all decisions of a pass. @param {PassRecord} one @param {Payload} payload */
function printing({ name }, { call, passes }) {
  if (!call) return `${NAMELESS}, to print them`;
  const place = passes.filter((one) => one.enabled).findIndex((one) => one.name === name);
  return `\`print(${call}.steps[${place}])\` has all`;
}
