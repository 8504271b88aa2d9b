// The findings: each with its evidence in numbers, the line that it comes from, and what to do about it.

import { h } from "./dom.js";
import { chip, copy } from "./passes.js";

const SEVERITY = { high: "▲ high", medium: "◆ medium", low: "● low" };
const ORDER = /** @type {const} */ (["high", "medium", "low"]);
const SHOWN_VALUES = 12;

/** @implements {Panel} */
export class FindingsPanel {
  /** @param {Act} act */
  constructor(act) {
    this.act = act;
    this.element = h("div", { class: "tf-table-panel tf-findings", "data-testid": "tf-findings" });
    /** @type {Payload | null} */
    this.payload = null;
  }

  /** @param {View} view */
  draw({ payload }) {
    if (payload === this.payload) return;
    this.payload = payload;
    const found = ORDER.flatMap((severity) => payload.findings.filter((one) => one.severity === severity));
    const cards = (/** @type {boolean} */ fixed) => found.filter((one) => one.fixed === fixed).map((one) => this.card(one));
    this.element.replaceChildren(...(found.length > 0 ? [...cards(false), ...cards(true)] : nothing(payload.looked_for)));
  }

  mark() {}

  /** @param {Finding} one */
  card(one) {
    const more = one.values.length - SHOWN_VALUES;
    return h(
      "article",
      { class: `tf-finding tf-finding-${one.fixed ? "fixed" : one.severity}`, "aria-label": one.title, "data-testid": `tf-finding-${one.name}` },
      h("div", { class: "tf-finding-head" }, h("span", { class: "tf-severity" }, one.fixed ? "✓ gone with the passes that are on" : SEVERITY[one.severity]), h("h3", null, one.title), h("code", { class: "tf-note" }, one.name)),
      one.evidence.length > 0 && h("table", { class: "tf-table" }, h("tbody", null, one.evidence.map(([label, value]) => h("tr", null, h("th", { scope: "row" }, label), h("td", null, value))))),
      one.source && h("p", null, h("span", { class: "tf-label" }, "line "), h("code", { class: "tf-source" }, one.source)),
      one.fix && h("div", { class: "tf-block" }, copyButton(one.fix), h("pre", { tabindex: "0", "aria-label": "fix" }, one.fix)),
      one.worth && h("p", null, h("span", { class: "tf-label" }, "worth "), one.worth),
      h("div", { class: "tf-finding-foot" }, this.tryIt(one), h("span", { class: "tf-chips" }, one.values.slice(0, SHOWN_VALUES).map((name) => chip(name, this.act)), more > 0 && `+${more}`)),
    );
  }

  /** @param {Finding} one */
  tryIt({ name, changes, fixed }) {
    if (!changes || fixed) return null;
    const isOn = Object.entries(changes).every(([option, value]) => JSON.stringify(this.payload?.config[option]) === JSON.stringify(value));
    if (isOn) return h("span", { class: "tf-note" }, "The pass that does this is on; its decisions say what it left.");
    const isHeld = this.act.holds(changes);
    const title = isHeld ? "switch it on, and see what changes" : "this saved page holds no such choice: run the cell in a notebook";
    return h("button", { class: "tf-button", disabled: !isHeld, title, onclick: () => this.act.configure(changes), "data-testid": `tf-try-${name}` }, "Try it");
  }
}

/** @param {string} text */
function copyButton(text) {
  const button = h("button", { class: "tf-chip tf-copy" }, "copy");
  button.onclick = () => copy(text, button);
  return button;
}

/** @param {string[]} lookedFor */
function nothing(lookedFor) {
  if (lookedFor.length === 0) return [h("p", { class: "tf-note" }, "This trace was not diagnosed.")];
  return [h("h3", null, "Nothing found"), h("p", { class: "tf-note" }, "What was looked for in this trace:"), h("ul", null, lookedFor.map((text) => h("li", null, text)))];
}
