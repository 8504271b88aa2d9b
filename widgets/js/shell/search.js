// The search field: what it finds becomes `matches` of every panel, and Enter walks through it.

import { h } from "../parts/dom.js";
import { ranks } from "../parts/modules.js";
import { found, parse, rank } from "./query.js";

const COUNT = new Intl.NumberFormat("en");

export class Search {
  /** @param {() => Payload} payload @param {(matches: Set<string> | null) => void} onFound @param {(value: string) => void} select */
  constructor(payload, onFound, select) {
    this.payload = payload;
    this.onFound = onFound;
    this.select = select;
    /** In the order of the program. @type {string[]} */
    this.order = [];
    this.at = -1;
    this.exact = 0;
    this.input = h("input", {
      type: "search",
      placeholder: "search ops, modules, kernels, source",
      "aria-label": "Search ops, modules, kernels, source",
      "aria-keyshortcuts": "/",
      spellcheck: "false",
      autocomplete: "off",
      oninput: () => this.run(),
      onkeydown: (/** @type {KeyboardEvent} */ event) => this.onKey(event),
      "data-testid": "tf-search",
    });
    const walk = (/** @type {string} */ id, /** @type {string} */ glyph, /** @type {string} */ label, /** @type {number} */ by) =>
      h("button", { class: "tf-chip tf-walk", disabled: true, "aria-label": label, title: label, onclick: () => this.step(by), "data-testid": `tf-search-${id}` }, glyph);
    this.back = walk("back", "◂", "previous hit (Shift Enter)", -1);
    this.next = walk("next", "▸", "next hit (Enter)", 1);
    this.count = h("span", { class: "tf-search-count", role: "status", "data-testid": "tf-search-count" });
    this.hint = h("p", { class: "tf-search-hint", role: "status", hidden: true, "data-testid": "tf-search-hint" });
    this.key = h("kbd", { "aria-hidden": "true" }, "/");
    this.element = h("div", { class: "tf-search", role: "search" }, this.input, this.key, this.back, this.next, this.count, this.hint);
  }

  /** Search for what stands in the field, or for `text`. @param {string} [text] */
  run(text) {
    if (text !== undefined) this.input.value = text;
    const { values, memory } = this.payload();
    const query = parse(this.input.value, values);
    const matches = found(query, values);
    const place = matches && ranks({ memory });
    const by = new Map([...(matches ?? [])].map((name) => [name, rank(query, name, values[name])]));
    // What is called so first, then in the order of the program.
    this.order = [...by.keys()].sort((a, b) => (by.get(a) ?? 0) - (by.get(b) ?? 0) || (place?.get(a) ?? -1) - (place?.get(b) ?? -1));
    /** So many are called so. */
    this.exact = [...by.values()].filter((one) => one === 0).length;
    this.at = -1;
    this.hint.textContent = query.hints.join(" ");
    this.hint.hidden = query.hints.length === 0;
    this.say(matches !== null);
    this.onFound(matches);
  }

  /** A new payload has other values. */
  refresh() {
    if (this.input.value) this.run();
  }

  /** @param {boolean} isSearching */
  say(isSearching) {
    this.element.classList.toggle("tf-searching", isSearching);
    const total = Object.keys(this.payload().values).length;
    const place = this.at < 0 ? "" : `${COUNT.format(this.at + 1)}/`;
    const text = `${place}${COUNT.format(this.order.length)} of ${COUNT.format(total)}`;
    this.count.textContent = isSearching ? text : "";
    this.count.title = isSearching ? `${COUNT.format(this.exact)} called so, ${COUNT.format(this.order.length - this.exact)} more contain it` : "";
    this.back.disabled = this.next.disabled = this.order.length === 0;
  }

  focus() {
    this.input.focus();
    this.input.select();
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    if (event.key === "Escape") this.run("");
    else if (event.key === "Enter") this.step(event.shiftKey ? -1 : 1);
    else return;
    event.preventDefault();
  }

  /** Select the match after or before. @param {number} by */
  step(by) {
    if (this.order.length === 0) return;
    const start = this.at < 0 && by < 0 ? 0 : this.at;
    this.at = (start + by + this.order.length) % this.order.length;
    this.say(true);
    this.select(this.order[this.at]);
  }
}
