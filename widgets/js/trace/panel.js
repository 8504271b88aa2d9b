// The Trace tab, a table that is a tree: modules with their times, and ops with their backward twins beside them.

import { formatTime, h, unique } from "../parts/dom.js";
import { buildTree, changes, slowestIn, time } from "../parts/modules.js";
import { percent, unitOf } from "../parts/widgets.js";
import { rowElement } from "./row.js";
import { computedBy, holders, Rows } from "./rows.js";

const ROW = 24;
/** Rows beyond either edge, so that a fast wheel shows no gap. */
const MARGIN = 10;
const COLUMNS = /** @type {const} */ ([["name", "module or op, all inside"], ["time", "forward"], ["time", "backward"], ["time", "update"], ["ratio", "bwd/fwd"], ["share", "of step"], ["ops", "ops"], ["saved", "saved"]]);

/** @implements {Panel} */
export class TreePanel {
  /** @param {Act} act */
  constructor(act) {
    this.act = act;
    this.id = unique("tf-tree");
    /** @type {import("./rows.js").State} */
    this.state = { options: { fold: true, removed: false, views: false }, toggled: new Map(), apart: new Set(), shown: new Map(), selected: "" };
    /** What the search found. @type {Set<string> | null} */
    this.matches = null;
    /** Values whose time is predicted, where those of others are measured. @type {Set<string>} */
    this.names = new Set();
    /** How many of them are in each branch. @type {Map<import("../parts/modules.js").Branch, number>} */
    this.hits = new Map();
    /** @type {import("./rows.js").Row[]} */
    this.rows = [];
    /** Where each value's row is. @type {Map<string, number>} */
    this.places = new Map();
    /** Whether the selected value has a row only because it is selected. */
    this.isGuest = false;
    this.active = "";
    this.top = 0;
    /** @type {View | null} */
    this.view = null;
    this.says = h("span", { class: "tf-tree-says", "data-testid": "tf-tree-says" });
    this.head = h("div", { class: "tf-tree-row tf-tree-head", role: "row", "aria-rowindex": "1" });
    this.window = h("div", { class: "tf-tree-window", role: "presentation" });
    this.space = h("div", { class: "tf-tree-space", role: "rowgroup" }, this.window);
    this.body = h(
      "div",
      { class: "tf-tree", role: "treegrid", "aria-label": "Modules and ops", tabindex: "0", "data-testid": "tf-tree" },
      h("div", { role: "rowgroup", class: "tf-tree-heads" }, this.head),
      this.space,
    );
    this.body.addEventListener("scroll", () => this.onScroll());
    this.body.addEventListener("click", (event) => this.onClick(event));
    this.body.addEventListener("keydown", (event) => this.onKey(event));
    const toolbar = h("div", { class: "tf-toolbar tf-tree-bar" }, this.option("fold", "fold layers"), this.option("removed", "removed"), this.option("views", "views"), this.says);
    this.element = h("div", { class: "tf-tree-panel" }, toolbar, this.body);
    this.resized = new ResizeObserver(() => this.paint());
    this.resized.observe(this.body);
  }

  destroy() {
    this.resized.disconnect();
  }

  /** @param {"fold" | "removed" | "views"} name @param {string} label */
  option(name, label) {
    const input = h("input", { type: "checkbox", checked: this.state.options[name], "data-testid": `tf-tree-${name}` });
    input.onchange = () => {
      this.state.options[name] = input.checked;
      this.refresh();
    };
    const titles = { fold: "identical layers in one row, summed", removed: "list what the passes removed", views: "list views and single results too, which take no time" };
    return h("label", { title: titles[name] }, input, label);
  }

  // --- what is shown -------------------------------------------------------------------------------------------------

  /** @param {View} view */
  draw(view) {
    if (this.view?.payload === view.payload) return;
    const { payload } = view;
    this.view = view;
    this.tree = buildTree(payload);
    this.names = new Set(payload.clock.predicted);
    this.predicted = holders(this.tree, payload.clock.predicted);
    this.list = undefined;
    this.changes = changes(payload);
    this.unit = unitOf(this.tree.total);
    this.hasUpdate = payload.update !== null;
    this.body.classList.toggle("tf-tree-with-update", this.hasUpdate);
    /** @type {Record<string, string>} */
    const titles = { ratio: "backward over forward", ...(payload.clock.launches && { name: "what kernels take to run, those of all inside; the step takes longer, to launch them", share: "of the kernels’ time", ops: "before → after the passes; a launch each, of an update one a list" }) };
    const labels = /** @type {Record<string, string>} */ (payload.clock.launches ? { name: "all inside, kernels’ time", share: "share" } : {});
    this.head.replaceChildren(...COLUMNS.filter(([, label]) => this.hasUpdate || label !== "update").map(([kind, label]) => h("span", { role: "columnheader", class: `tf-tree-${kind}`, title: titles[kind] ?? label }, labels[kind] ?? label, kind === "name" && `, in ${this.unit?.name}`)));
  }

  /** Whose times these are, and which module to look at first. */
  drawSays() {
    const { tree, view } = this;
    if (!tree || !view) return;
    const { clock, no_verdict: reason, slowest } = view.payload;
    this.slowest = slowestIn(tree, slowest);
    const [, kind] = clock.kinds;
    const said = kind === "modelled" ? kind : `${kind} ${kind === "measured" ? "on" : "for"} ${clock.device}`;
    const kernels = formatTime(time(tree.total));
    const parts = [h("span", { class: "tf-note", title: clock.provenance.join("; before: ") }, clock.launches && !this.hasUpdate ? `kernels ${kernels} in all, ${said}` : said)];
    if (reason) parts.unshift(h("span", { class: "tf-note" }, reason));
    if (tree.total.update[1] > 0) parts.unshift(h("span", { class: "tf-note", "data-testid": "tf-tree-update" }, `The optimizer takes ${percent(tree.total.update[1], time(tree.total))} of the ${clock.launches ? `kernels’ ${kernels}` : "step"}.`));
    if (slowest) parts.unshift(h("button", { class: "tf-chip", onclick: () => this.slowest && this.goTo(this.slowest[0]), title: `Go to it. ${slowest.line}`, "data-testid": "tf-tree-slowest" }, "▲ ", slowest.said));
    this.says.replaceChildren(...parts);
  }

  /** @param {View} view */
  mark(view) {
    const { state } = this;
    const isNew = view.selected !== state.selected;
    // Walking from row to row changes none of them.
    const isSame = this.list !== undefined && !this.isGuest && (!view.selected || this.places.has(view.selected));
    this.view = view;
    state.selected = view.selected;
    if (!isSame) this.refresh();
    if (view.matches !== this.matches || !isSame) this.search(view.matches);
    if (isNew && view.selected) this.reveal(view.selected);
    if (this.body.scrollTop !== this.top) this.body.scrollTop = this.top;
    this.paint();
  }

  /** What was found is marked where it is; nothing unfolds for it, and closed rows say how much is in them. @param {Set<string> | null} matches */
  search(matches) {
    this.matches = matches;
    this.hits.clear();
    for (const name of matches ?? []) {
      for (let at = this.tree?.home.get(name) ?? null; at; at = at.parent) this.hits.set(at, (this.hits.get(at) ?? 0) + 1);
    }
  }

  /** List the rows anew. */
  refresh() {
    if (!this.tree || !this.view) return;
    this.drawSays();
    this.list = new Rows(this.tree, this.view.payload.values, this.state);
    this.rows = this.list.list();
    this.places.clear();
    for (const [at, row] of this.rows.entries()) {
      if (row.kind === "pair") for (const name of [row.left, row.right]) this.places.set(name, at);
      // The layer that was selected last stands for the others, also once nothing is.
      else if (row.kind === "group" && row.group.layers.length > 0) this.state.shown.set(row.key, row.group.shown.name);
    }
    const { selected } = this.state;
    this.isGuest = selected !== "" && this.tree.home.has(selected) && !this.list.isListed(selected);
    this.space.style.height = `${Math.max(1, this.rows.length) * ROW}px`;
    this.body.setAttribute("aria-rowcount", String(this.rows.length + 1));
    this.paint();
  }

  paint() {
    const { view, tree, unit } = this;
    if (!view || !tree || !unit) return;
    const height = this.body.clientHeight || 480;
    const from = Math.max(0, Math.floor(this.body.scrollTop / ROW) - MARGIN);
    const shown = this.rows.slice(from, from + Math.ceil(height / ROW) + 2 * MARGIN);
    const { values, no_verdict, unused } = view.payload;
    const twins = new Set((values[view.selected]?.twins ?? []).map((name) => computedBy(name, values)));
    const context = { values, tree, unit, provenance: unused.provenance, isPredicted: (/** @type {string} */ name) => this.names.has(name), predicted: this.predicted ?? new Set(), twins, matches: this.matches, hits: this.hits, hasRatios: !no_verdict, hasUpdate: this.hasUpdate ?? false, changes: this.changes ?? new Map(), slowest: new Set(this.slowest), state: this.state, active: this.active, selected: view.selected };
    this.window.style.transform = `translateY(${from * ROW}px)`;
    this.window.replaceChildren(...shown.map((row, at) => rowElement(row, `${this.id}-${from + at}`, from + at + 2, context)));
    if (this.rows.length === 0) this.window.replaceChildren(h("p", { class: "tf-note tf-tree-empty" }, "No ops in this trace."));
    const at = this.rows.findIndex((row) => row.key === this.active);
    const isInSight = at >= from && at < from + shown.length;
    isInSight ? this.body.setAttribute("aria-activedescendant", `${this.id}-${at}`) : this.body.removeAttribute("aria-activedescendant");
  }

  onScroll() {
    this.top = this.body.scrollTop;
    this.paint();
  }

  // --- going somewhere -----------------------------------------------------------------------------------------------

  /** Unfold the way to a value that was selected, and scroll there. @param {string} name */
  reveal(name) {
    const { list, state } = this;
    const home = this.tree?.home.get(name);
    if (!list || !home) return;
    if (!this.places.has(name)) {
      for (const key of list.wayTo(home)) state.toggled.set(key, true);
      this.refresh();
    }
    const at = this.places.get(name) ?? -1;
    if (at >= 0) this.activate(at);
  }

  /** @param {import("../parts/modules.js").Branch} branch */
  goTo(branch) {
    if (!this.list) return;
    const way = this.list.wayTo(branch);
    for (const key of way.slice(0, -1)) this.state.toggled.set(key, true);
    this.refresh();
    const at = this.rows.findIndex((row) => row.key === way.at(-1));
    if (at >= 0) this.activate(at);
    this.body.focus({ preventScroll: true });
  }

  /** Make a row the current one, and bring it into sight. @param {number} at */
  activate(at) {
    this.active = this.rows[at].key;
    const top = at * ROW;
    const space = this.body.clientHeight - this.head.offsetHeight;
    const { scrollTop } = this.body;
    if (top < scrollTop) this.body.scrollTop = Math.max(0, top - ROW);
    else if (top + ROW > scrollTop + space) this.body.scrollTop = top - space + 2 * ROW;
    this.top = this.body.scrollTop;
    this.paint();
  }

  // --- mouse and keyboard --------------------------------------------------------------------------------------------

  /** @param {Event} event */
  rowOf(event) {
    const element = /** @type {HTMLElement} */ (event.target).closest("[data-row]");
    const at = Number(element?.getAttribute("data-row") ?? -1);
    return { at, row: this.rows[at] };
  }

  /** @param {MouseEvent} event */
  onClick(event) {
    const { at, row } = this.rowOf(event);
    if (!row || row.kind === "note") return;
    const target = /** @type {HTMLElement} */ (event.target);
    this.activate(at);
    if (row.kind === "unused") return;
    if (row.kind === "pair") {
      this.act.select(target.closest(".tf-tree-right") && row.right ? row.right : row.left || row.right);
      // Rows are made anew by the first click, so that no double click ever has one target.
      return event.detail === 2 ? this.act.openTab("code") : undefined;
    }
    target.closest(".tf-tree-times") ? this.takeApart(row) : this.toggle(row);
  }

  /** @param {import("./rows.js").GroupRow} row */
  toggle(row) {
    this.state.toggled.set(row.key, !row.open);
    this.refresh();
  }

  /** Identical layers one by one, or together again. @param {import("./rows.js").GroupRow} row */
  takeApart(row) {
    const { apart, toggled } = this.state;
    if (row.group.layers.length === 0) return;
    if (!apart.delete(row.key)) apart.add(row.key);
    toggled.set(row.key, true);
    this.refresh();
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const at = this.rows.findIndex((row) => row.key === this.active);
    const page = Math.max(1, Math.floor(this.body.clientHeight / ROW) - 2);
    const steps = /** @type {Record<string, number>} */ ({ ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity });
    if (event.key in steps) this.walk(at, steps[event.key]);
    else if (event.key === "ArrowRight" || event.key === "ArrowLeft") this.sideways(at, event.key === "ArrowRight");
    else if (event.key === "Enter" || event.key === " ") this.enter(this.rows[at], event.key);
    else if (event.key === "Escape") this.act.select("");
    else if (event.key === "x" && this.rows[at]?.kind === "group") this.takeApart(/** @type {any} */ (this.rows[at]));
    else return;
    event.preventDefault();
  }

  /** @param {number} at @param {number} by */
  walk(at, by) {
    const last = this.rows.length - 1;
    let to = Math.min(last, Math.max(0, at + by));
    if (this.rows[to]?.kind === "note") to += by < 0 ? -1 : 1;
    this.go(to);
  }

  /** Go to a row, and select its value where it has one. @param {number} at */
  go(at) {
    const row = this.rows[at];
    if (!row) return;
    this.activate(at);
    if (row.kind === "pair") this.act.select(row.left || row.right);
  }

  /** Into the tree and out of it; in a row of an op to its backward twin and back. @param {number} at @param {boolean} right */
  sideways(at, right) {
    const row = this.rows[at];
    if (!row || row.kind === "note") return;
    const isRight = row.kind === "pair" && this.state.selected === row.right;
    if (row.kind === "group" && row.open !== right) return this.toggle(row);
    if (row.kind === "group" && right) return this.walk(at, 1);
    if (row.kind === "pair" && right) return row.right && !isRight ? this.act.select(row.right) : undefined;
    if (row.kind === "pair" && isRight && row.left) return this.act.select(row.left);
    if (!right) this.go(row.parent);
  }

  /** @param {import("./rows.js").Row | undefined} row @param {string} key */
  enter(row, key) {
    if (row?.kind === "group") return this.toggle(row);
    if (row?.kind !== "pair") return;
    if (this.state.selected !== row.left && this.state.selected !== row.right) this.act.select(row.left || row.right);
    if (key === "Enter") this.act.openTab("code");
  }
}
