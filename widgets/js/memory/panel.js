// The Memory tab: what is alive at the static peak, before and after the passes, as a flame, and what is saved in a table.

import { formatBytes, h } from "../parts/dom.js";
import { percent } from "../parts/widgets.js";
import { bars, tree } from "./flame.js";

const ROW = 22;
/** Narrower blocks can neither be read nor hit: the table has them. */
const LEAST = 0.004;
const SIDES = /** @type {const} */ (["Before", "After"]);

/** @typedef {import("./flame.js").Block} Block */

/** @implements {Panel} */
export class MemoryPanel {
  /** @param {Act} act */
  constructor(act) {
    this.act = act;
    this.element = h("div", { class: "tf-peak-panel", "data-testid": "tf-peak-panel" });
    /** What is drawn. @type {AtPeak | null} */
    this.drawn = null;
    /** What selects which value. @type {[string, HTMLElement][]} */
    this.controls = [];
  }

  /** @param {View} view */
  draw({ payload }) {
    const { at_peak: atPeak, reasons } = payload.memory;
    if (atPeak === this.drawn) return;
    this.drawn = atPeak;
    this.controls = [];
    const root = tree(atPeak);
    const said = new Map(reasons.map(([name, , , why]) => [name, why]));
    this.element.replaceChildren(
      h("p", { class: "tf-note" }, "Static bytes, in the op with the most alive; of what is saved then: its module, and why. The Layers tab has all that is saved."),
      this.flame(root, 0, said),
      this.flame(root, 1, said),
      this.table(atPeak, said),
    );
  }

  /** @param {Block} root @param {0 | 1} side @param {Map<string, string>} said */
  flame(root, side, said) {
    const found = bars(root, side);
    const levels = 1 + Math.max(...[...bars(root, 0), ...bars(root, 1)].map(({ level }) => level), 0);
    const shown = found.filter(({ from, to }) => to - from >= LEAST);
    const at = this.drawn?.at[side];
    return h(
      "section",
      { "aria-label": `${SIDES[side]} the passes` },
      h("h3", null, SIDES[side], h("span", { class: "tf-note" }, at ? ` ${formatBytes(root.bytes[side])} at ${at}` : " no ops")),
      h("div", { class: "tf-flame", style: `height: ${levels * ROW}px`, "data-testid": `tf-flame-${SIDES[side].toLowerCase()}` }, shown.map((bar) => this.bar(bar, root, side, said))),
    );
  }

  /** @param {import("./flame.js").Bar} bar @param {Block} root @param {0 | 1} side @param {Map<string, string>} said */
  bar({ block, level, from, to }, root, side, said) {
    const { name, path, bytes, value } = block;
    const why = block.kind === "reason" ? `${path}: ${said.get(name) ?? ""}` : path;
    const title = `${name} ${formatBytes(bytes[0])} → ${formatBytes(bytes[1])}, ${percent(bytes[side], root.bytes[side])} of this peak\n${why}`;
    const attributes = { class: `tf-slab tf-slab-${block.kind}`, style: `left: ${100 * from}%; width: ${100 * (to - from)}%; top: ${level * ROW}px`, title };
    const text = `${name} ${formatBytes(bytes[side])}`;
    return value ? this.selecting(value, attributes, text) : h("div", attributes, text);
  }

  /** A button that selects a value. @param {string} value @param {Record<string, any>} attributes @param {string} text */
  selecting(value, attributes, text) {
    const button = h("button", { ...attributes, onclick: () => this.act.select(value) }, text);
    this.controls.push([value, button]);
    return button;
  }

  /** @param {AtPeak} atPeak @param {Map<string, string>} said */
  table({ saved }, said) {
    const rows = [...saved].sort((a, b) => Math.max(b[2], b[3]) - Math.max(a[2], a[3]));
    const heads = ["saved at the peak", "why", "before", "after", "storages"];
    return h(
      "div",
      { class: "tf-scroll" },
      h(
        "table",
        { class: "tf-table", "data-testid": "tf-memory-table" },
        h("thead", null, h("tr", null, heads.map((head, at) => h("th", { scope: "col", class: at > 1 ? "tf-right" : null }, head)))),
        h("tbody", null, rows.map((row) => this.row(row, said))),
      ),
    );
  }

  /** @param {AtPeak["saved"][number]} row @param {Map<string, string>} said */
  row([module, reason, before, after, count, value], said) {
    const button = this.selecting(value, { class: "tf-chip", title: `the largest: ${value}` }, module);
    const mood = after < before ? "tf-right tf-gain" : after > before ? "tf-right tf-cost" : "tf-right";
    return h("tr", null, h("th", { scope: "row" }, button), h("td", { title: said.get(reason) }, reason), h("td", { class: "tf-right" }, formatBytes(before)), h("td", { class: mood }, formatBytes(after)), h("td", { class: "tf-right" }, String(count)));
  }

  /** @param {View} view */
  mark({ selected }) {
    for (const [value, one] of this.controls) one.toggleAttribute("aria-current", value === selected);
  }
}
