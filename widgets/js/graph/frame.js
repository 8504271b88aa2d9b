// The elements of the Graph tab: the canvas, the minimap, and the controls around them.

import { formatTime, h, plural } from "../parts/dom.js";
import { letter, shortOp } from "./text.js";

export const MAP_WIDTH = 64;
const SHOWN_KEYS = 10;
const HUES = 8;
const LABEL =
  "Graph of the trace. Down and up follow the edges, left and right lead to neighbours and twins, Enter opens and closes a module, Shift with arrows moves the view, plus, minus and 0 zoom.";

/** What the controls ask for. */
/** @typedef {{ deeper(by: number): void, expandAll(): void, collapseAll(): void, zoom(factor: number): void, fit(): void, recolour(): void, onSwitch(id: string): void }} Controls */

export class GraphFrame {
  canvas = h("canvas", { class: "tf-graph-canvas", tabindex: "0", role: "application", "aria-label": LABEL, "data-testid": "tf-graph" });
  map = h("canvas", { class: "tf-graph-map", "aria-hidden": "true", "data-testid": "tf-graph-map" });
  window = h("div", { class: "tf-graph-window", "data-testid": "tf-graph-window" });
  tip = h("div", { class: "tf-graph-tip", role: "tooltip", hidden: true, "data-testid": "tf-graph-tip" });
  live = h("div", { class: "tf-graph-live", role: "status", "data-testid": "tf-graph-live" });
  stage = h("div", { class: "tf-graph-stage" }, this.canvas, this.map, this.window, this.tip, this.live);
  depth = h("output", { "data-testid": "tf-graph-depth" });
  legend = h("ul", { class: "tf-graph-legend", "aria-label": "colours", tabindex: "0", "data-testid": "tf-graph-legend" });

  /** @param {Controls} controls */
  constructor(controls) {
    const option = (/** @type {string} */ value, /** @type {string} */ text) => h("option", { value }, text);
    this.colouring = h("select", { "aria-label": "Colours", "data-testid": "tf-graph-colouring", onchange: controls.recolour }, option("kernel", "by kernel"), option("time", "by time"));
    const box = (/** @type {string} */ id, /** @type {boolean} */ checked) => h("input", { type: "checkbox", checked, "data-testid": `tf-graph-${id}`, onchange: () => controls.onSwitch(id) });
    this.links = box("links", false);
    this.views = box("views", false);
    this.removed = box("removed", false);
    this.fold = box("fold", true);
    this.element = h("div", { class: "tf-graph" }, this.toolbar(controls), this.stage, this.legend);
  }

  /** @param {Controls} controls */
  toolbar(controls) {
    const button = (/** @type {string} */ id, /** @type {string} */ text, /** @type {string} */ title, /** @type {() => void} */ onclick) =>
      h("button", { title, "aria-label": title, onclick, "data-testid": `tf-graph-${id}` }, text);
    const group = (/** @type {string} */ label, /** @type {HTMLElement[]} */ ...children) => h("div", { class: "tf-graph-group", role: "group", "aria-label": label }, ...children);
    return h(
      "div",
      { class: "tf-toolbar tf-graph-bar", role: "group", "aria-label": "Graph" },
      group("Depth", button("shallower", "−", "one level of modules less", () => controls.deeper(-1)), this.depth, button("deeper", "+", "one level of modules more", () => controls.deeper(1))),
      group("Modules", button("expand", "▾ all", "expand all modules", controls.expandAll), button("collapse", "▸ all", "collapse all modules", controls.collapseAll)),
      group("Zoom", button("out", "−", "zoom out (−)", () => controls.zoom(1 / 1.25)), button("fit", "fit", "fit the width (0)", controls.fit), button("in", "+", "zoom in (+)", () => controls.zoom(1.25))),
      this.colouring,
      h("label", { title: "all links from the forward to the backward; the selected value's are always shown" }, this.links, "saved"),
      h("label", { title: "views and single outputs, for which nothing runs" }, this.views, "views"),
      h("label", { title: "ops that the passes removed" }, this.removed, "removed"),
      h("label", { title: "one of identical layers stands for all" }, this.fold, "fold"),
    );
  }

  get isHeat() {
    return this.colouring.value === "time";
  }

  /** Give the canvases the stage's size. @returns {{ w: number, h: number } | null} the graph's in CSS pixels, null while the panel is not shown */
  resize() {
    const { width, height } = this.stage.getBoundingClientRect();
    if (!width || !height) return null;
    for (const [canvas, w] of /** @type {const} */ ([[this.canvas, width - MAP_WIDTH], [this.map, MAP_WIDTH]])) {
      canvas.width = Math.round(w * devicePixelRatio);
      canvas.height = Math.round(height * devicePixelRatio);
    }
    return { w: width - MAP_WIDTH, h: height };
  }

  /** What of the map is in view. @param {number} top @param {number} height */
  showWindow(top, height) {
    this.window.style.top = `${top}px`;
    this.window.style.height = `${Math.max(6, height)}px`;
  }

  /** @param {{ key: string, us: number, count: number }[]} all @param {Map<string, number>} keys */
  showKeys(all, keys) {
    const items = all.slice(0, SHOWN_KEYS).map(({ key, us, count }) => {
      const at = keys.get(key) ?? 0;
      const title = `${key}: ${plural(count, "launch", "launches")}${us ? `, ${formatTime(us)} in all` : ""}`;
      const swatch = h("i", { class: "tf-graph-swatch" }, letter(at));
      swatch.style.background = `var(--tf-graph-${at % HUES})`;
      return h("li", { title }, swatch, h("span", null, shortOp(key)), h("small", null, `×${count}`));
    });
    const rest = all.length - SHOWN_KEYS;
    this.legend.replaceChildren(...items, ...(rest > 0 ? [h("li", null, `+${rest} more`)] : []), h("li", null, "◆ saved for the backward"));
  }

  /** @param {number} most µs @param {string} provenance */
  showHeat(most, provenance) {
    const text = most ? `0 … ${formatTime(most)}, ${provenance}` : "No times: measure on a GPU to see them.";
    this.legend.replaceChildren(h("li", null, h("i", { class: "tf-graph-ramp" }), text));
  }

  /** @param {string[]} text none hides it @param {{ clientX: number, clientY: number }} event */
  showTip(text, event) {
    this.tip.hidden = text.length === 0;
    if (this.tip.hidden) return;
    this.tip.replaceChildren(...text.map((line, at) => h(at ? "div" : "b", null, line)));
    const frame = this.stage.getBoundingClientRect();
    const { offsetWidth, offsetHeight } = this.tip;
    this.tip.style.left = `${Math.max(0, Math.min(event.clientX - frame.left + 14, frame.width - offsetWidth - 4))}px`;
    const below = event.clientY - frame.top + 16;
    this.tip.style.top = `${below + offsetHeight > frame.height ? Math.max(0, below - offsetHeight - 28) : below}px`;
  }
}
