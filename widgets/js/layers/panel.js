// The Layers tab: for each module the time of its own ops, forward and backward, and which module to look at first.

import { formatBytes, h } from "../parts/dom.js";
import { buildTree } from "../parts/modules.js";
import { inUnit, percent, unitOf } from "../parts/widgets.js";
import { answer, expected, folded, isIn, isOutOfLine, layersOf, parts, sorted, stepTime, WORK } from "./rows.js";

/** @typedef {import("./rows.js").Layer} Layer @typedef {import("./rows.js").Column} Column */

const COLUMNS = /** @type {[Column, string, string][]} */ ([
  ["path", "module, own ops", ""],
  ["type", "type", ""],
  ["forward", "forward", "tf-right"],
  ["backward", "backward", "tf-right"],
  ["update", "update", "tf-right"],
  ["ratio", "ratio", "tf-right"],
  ["share", "of step", "tf-right"],
  ["change", "before → after", "tf-right"],
  ["saved", "saved", "tf-right"],
  ["cause", "time by kind", ""],
]);
const TITLES = /** @type {Partial<Record<Column, string>>} */ ({ ratio: "backward over forward; below it that of the FLOPs, where there are matmuls", change: "all of the step together, before the passes and after", cause: "what the backward's time goes to; the thin line is before the passes" });

/** @implements {Panel} */
export class LayersPanel {
  /** @param {Act} act */
  constructor(act) {
    this.act = act;
    /** @type {{ column: Column, descending: boolean }} */
    this.sort = { column: "backward", descending: true };
    this.fold = h("input", { type: "checkbox", checked: true, onchange: () => this.redraw(), "data-testid": "tf-layers-fold" });
    this.says = h("p", { class: "tf-layers-says", role: "status", "data-testid": "tf-layers-says" });
    this.table = h("div");
    const label = h("label", { class: "tf-layers-fold" }, this.fold, "fold identical");
    this.element = h("div", { class: "tf-table-panel tf-layers" }, h("div", { class: "tf-layers-head" }, this.says, label), this.table);
    /** @type {View | null} */
    this.view = null;
    this.columns = COLUMNS;
    /** @type {[HTMLTableRowElement, Layer][]} */
    this.rows = [];
  }

  /** @param {View} view */
  draw(view) {
    if (this.view?.payload === view.payload) return;
    this.view = view;
    this.tree = buildTree(view.payload);
    this.redraw();
  }

  redraw() {
    const { view, tree } = this;
    if (!view || !tree) return;
    this.columns = COLUMNS.filter(([column]) => column !== "update" || view.payload.update !== null);
    const all = layersOf(view.payload);
    const layers = sorted(this.fold.checked ? folded(all) : all, this.sort.column, this.sort.descending);
    const unit = unitOf(tree.total);
    const total = all.reduce((sum, row) => sum + stepTime(row), 0);
    const scale = Math.max(...layers.flatMap((row) => row.backward));
    const whole = view.payload.clock.launches ? "the kernels’ time" : "the step";
    this.rows = layers.map((layer) => [this.row(layer, { unit, total, scale, hasRatios: !view.payload.no_verdict }), layer]);
    this.says.textContent = layers.length === 0 ? "No module ran in this trace." : view.payload.backward.ops[1] === 0 ? "There is no backward in this program." : view.payload.no_verdict || answer(layers, whole);
    const head = h("tr", null, this.columns.map((column) => this.header(column)));
    const body = h("tbody", null, this.rows.map(([row]) => row));
    const table = h("table", { class: "tf-table", "data-testid": "tf-layers" }, h("thead", null, head), body);
    const { after } = view.payload.times;
    const note = h("p", { class: "tf-note", title: after }, `In ${unit.name} of ${whole}, ${after.split(/[: ]/)[0]}, of each module's own ops; Trace sums those inside.`);
    this.table.replaceChildren(...(layers.length ? [note, legend(all), table] : []));
    this.mark(view);
  }

  /** @param {[Column, string, string]} column */
  header([column, label, align]) {
    const isSorted = column === this.sort.column;
    const order = this.sort.descending ? "descending" : "ascending";
    const button = h("button", { onclick: () => this.sortBy(column), title: TITLES[column], "data-testid": `tf-layers-by-${column}` }, label, isSorted && h("span", { "aria-hidden": "true" }, this.sort.descending ? " ↓" : " ↑"));
    return h("th", { scope: "col", class: `${align} tf-layers-${column}`, "aria-sort": isSorted ? order : null }, button);
  }

  /** Largest first; names from A. Again: the other way round. @param {Column} column */
  sortBy(column) {
    const isText = ["path", "type", "cause"].includes(column);
    this.sort = { column, descending: column === this.sort.column ? !this.sort.descending : !isText };
    this.redraw();
    /** @type {HTMLElement | null} */ (this.table.querySelector(`[data-testid="tf-layers-by-${column}"]`))?.focus();
  }

  /** @param {Layer} layer @param {{ unit: { name: string, us: number }, total: number, scale: number, hasRatios: boolean }} table */
  row(layer, { unit, total, scale, hasRatios }) {
    const text = (/** @type {number} */ us) => (us > 0 ? inUnit(us, unit) : "–");
    const [before, after] = [stepTime(layer, 0), stepTime(layer)];
    const [forward, backward] = [layer.forward[1], layer.backward[1]];
    const cells = /** @type {Record<Column, (Node | string | number | false)[]>} */ ({
      path: [],
      type: [layer.type],
      forward: [text(forward)],
      backward: [text(backward)],
      update: [text(layer.update[1])],
      ratio: hasRatios && backward ? ratio(layer) : [],
      share: [percent(after, total)],
      change: before === after ? [text(after)] : [h("span", { class: "tf-tree-was" }, text(before)), ` → ${text(after)}`],
      saved: [layer.saved > 0 ? formatBytes(layer.saved) : ""],
      cause: layer.backward[0] > 0 || backward > 0 ? kinds(layer, scale) : [],
    });
    const name = h("button", { class: "tf-layers-name", onclick: () => this.open(layer), title: `${layer.path}: ${layer.type}\nshow it in the trace`, "data-testid": `tf-layer-${layer.path}` }, layer.path);
    const times = layer.modules.length > 1 && h("span", { class: "tf-badge" }, `×${layer.modules.length}`);
    const [, ...others] = this.columns;
    return h("tr", null, h("th", { scope: "row" }, name, " ", times), others.map(([column, , align]) => h("td", { class: `${align} tf-layers-${column}`, title: column === "cause" ? alternative(layer) : column === "type" ? layer.type : null }, ...cells[column])));
  }

  /** Select the op that takes most in it, and show the tree there. @param {Layer} layer */
  open(layer) {
    const values = this.view?.payload.values ?? {};
    const us = (/** @type {string} */ name) => values[name].time_us[1] ?? -1;
    const [most] = this.namesIn(layer).sort((one, other) => us(other) - us(one));
    if (most !== undefined) this.act.select(most);
    this.act.openTab("trace");
  }

  /** @param {Layer} layer */
  namesIn(layer) {
    return [...(this.tree?.home ?? [])].filter(([, home]) => isIn(layer, home)).map(([name]) => name);
  }

  /** @param {View} view */
  mark(view) {
    this.view = view;
    const { matches, selected } = view;
    const homes = (/** @type {Iterable<string>} */ names) => new Set([...names].flatMap((name) => this.tree?.home.get(name) ?? []));
    const found = matches && [...homes(matches)];
    const [home] = homes([selected]);
    for (const [row, layer] of this.rows) {
      row.hidden = found !== null && !found.some((one) => isIn(layer, one));
      row.classList.toggle("tf-current", home !== undefined && isIn(layer, home));
    }
  }
}

/** @param {Layer} layer */
function ratio(layer) {
  const by = expected(layer);
  const found = layer.backward[1] / layer.forward[1];
  // As in `tracefuse.tables.layers`: without a module, or where another one's kernel does its forward, it has no meaning.
  const own = h("span", { class: isOutOfLine(layer) ? "tf-cost" : null }, !layer.modules.length || found > 99 ? "—" : `${found.toFixed(1)}×`);
  return by > 0 ? [own, h("small", { class: "tf-note" }, ` FLOPs ${by.toFixed(1)}×`)] : [own];
}

/** One bar for the backward as shown, stacked by kind, and a thin one for before. @param {Layer} layer @param {number} scale µs of the longest */
function kinds(layer, scale) {
  const bar = (/** @type {0 | 1} */ at) =>
    h("i", { style: `width: ${(100 * layer.backward[at]) / scale}%` }, WORK.map((kind, number) => layer.kinds[at][kind] > 0 && h("b", { class: `tf-work-${number}`, style: `flex: ${layer.kinds[at][kind]}` })).filter((one) => one !== false));
  return [h("div", { class: "tf-kinds-of", role: "img", "aria-label": alternative(layer) }, bar(1), bar(0)), h("small", { class: "tf-note", "aria-hidden": "true" }, layer.cause)];
}

/** The bars in words. @param {Layer} layer */
function alternative({ kinds: [before, after] }) {
  const [was, is] = [parts(before), parts(after)];
  return was === is || !was ? is : `${is || "nothing"}; before the passes: ${was}`;
}

/** The colours of what there is. @param {Layer[]} layers */
function legend(layers) {
  const there = WORK.map((kind, number) => layers.some((row) => row.kinds[0][kind] > 0 || row.kinds[1][kind] > 0) && h("span", null, h("b", { class: `tf-work-${number}` }), kind)).filter((one) => one !== false);
  return h("p", { class: "tf-work-legend", "data-testid": "tf-work-legend" }, there);
}
