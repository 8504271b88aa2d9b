// One strip about the selected value: what it is, who reads it, its twin in the other half, and why the passes left it so.

import { formatBytes, h } from "./dom.js";
import { chip } from "./passes.js";

const SHOWN = 12;

/** @param {string} name @param {Payload} payload @param {Act} act */
export function details(name, payload, act) {
  const value = payload.values[name];
  const attributes = { class: "tf-details", "data-testid": "tf-details", "aria-live": "polite" };
  if (!value) {
    return h("div", attributes, h("span", { class: "tf-note" }, "Click a value, or walk with ↑ ↓, to see who reads it and what was decided about it."));
  }
  return h(
    "div",
    attributes,
    h(
      "div",
      { class: "tf-facts" },
      h("b", { class: "tf-name" }, name),
      h("code", null, value.type),
      h("span", null, formatBytes(value.nbytes)),
      h("span", null, value.op),
      h("span", { class: "tf-note" }, value.phase),
      value.saved && h("span", { class: "tf-badge" }, "saved for backward"),
      value.removed && h("span", { class: "tf-badge" }, "removed by a pass"),
      h("button", { class: "tf-chip tf-close", "aria-label": "clear the selection", onclick: () => act.select("") }, "×"),
    ),
    value.source && fact("line", h("code", { class: "tf-source" }, value.source)),
    value.module && fact("module", h("code", null, `${value.module}: ${value.module_type}`)),
    chips("reads", value.reads, act),
    chips("read by", value.uses, act),
    chips(value.phase === "forward" ? "backward twin" : "forward twin", value.twins, act),
    ...decisions(name, payload),
  );
}

/** @param {string} label @param {...(Node | string)} content */
function fact(label, ...content) {
  return h("div", { class: "tf-fact" }, h("span", { class: "tf-label" }, label), h("span", { class: "tf-chips" }, ...content));
}

/** @param {string} label @param {string[]} names @param {Act} act */
function chips(label, names, act) {
  if (names.length === 0) return null;
  const more = names.length - SHOWN;
  return fact(label, ...names.slice(0, SHOWN).map((name) => chip(name, act)), more > 0 ? h("span", { class: "tf-note" }, `+${more}`) : "");
}

/** @param {string} name @param {Payload} payload */
function decisions(name, payload) {
  return payload.passes.flatMap((one) =>
    one.decisions
      .filter((decision) => decision.values.includes(name))
      .map((decision) => fact(one.name, h("span", null, h("span", { class: "tf-action" }, decision.action), ` ${decision.reason}`))),
  );
}
