// The rows of the trace's tree that are shown, given what is unfolded, searched for and selected. It needs no DOM.

import { add, nothing, runs } from "../parts/modules.js";

/** What the reader chose. @typedef {{ fold: boolean, removed: boolean, views: boolean }} Options */

/**
 * @typedef {object} State
 * @property {Options} options
 * @property {Map<string, boolean>} toggled groups that the reader opened or closed, by key
 * @property {Set<string>} apart folds whose layers are listed one by one
 * @property {Map<string, string>} shown by a fold's key, the layer that stands for all
 * @property {string} selected
 */

/**
 * A row that unfolds: one module or line, or the corresponding ones of identical layers, summed.
 * @typedef {object} Group
 * @property {string} key
 * @property {string} name
 * @property {string} prefix of the name, where rows above it have none of their own
 * @property {import("../parts/modules.js").Branch[]} members
 * @property {import("../parts/modules.js").Branch} shown the member whose inside is listed
 * @property {import("../parts/modules.js").Branch[]} layers those folded into this row; else empty
 * @property {import("../parts/modules.js").Sums} sums
 */

/**
 * @typedef {{ kind: "group", key: string, level: number, parent: number, group: Group, open: boolean }} GroupRow
 * @typedef {{ kind: "pair", key: string, level: number, parent: number, left: string, right: string }} PairRow values; "" where there is none
 * @typedef {{ kind: "note", key: string, level: number, parent: number, group: Group }} NoteRow
 * @typedef {{ kind: "unused", key: string, level: number, parent: number, op: Unused }} UnusedRow
 * @typedef {GroupRow | PairRow | NoteRow | UnusedRow} Row
 */

/** @typedef {import("../parts/modules.js").Branch} Branch @typedef {import("../parts/modules.js").Tree} Tree */

/** Rows that fit on one screen. */
const SCREEN = 20;

export class Rows {
  /** @param {Tree} tree @param {Record<string, Value>} values @param {State} state */
  constructor(tree, values, state) {
    this.tree = tree;
    this.values = values;
    this.state = state;
    this.holders = holders(tree, [state.selected]);
    this.folds = state.options.fold;
    /** @type {Map<Branch, boolean>} */
    this.withFold = new Map();
    this.unfolded = this.unfoldedAtFirst();
  }

  /** @returns {Row[]} */
  list() {
    /** @type {Row[]} */
    const rows = [];
    for (const group of this.groups(this.tree.top, null)) this.append(rows, group, 1, -1);
    return rows;
  }

  /** @param {Row[]} rows @param {Group} group @param {number} level @param {number} parent */
  append(rows, group, level, parent) {
    const at = rows.length;
    const open = this.isOpen(group.key);
    rows.push({ kind: "group", key: group.key, level, parent, group, open });
    if (!open) return;
    const note = () => rows.push({ kind: "note", key: `${group.key}//`, level: level + 1, parent: at, group });
    if (group.layers.length > 0) note();
    for (const child of this.inside(group)) this.append(rows, child, level + 1, at);
    const pairs = this.pairs(group.shown);
    if (pairs.length > 0 && group.members.length > 1 && group.layers.length === 0) note();
    for (const [left, right] of pairs) rows.push({ kind: "pair", key: `${group.key}//${left || right}`, level: level + 1, parent: at, left, right });
    for (const [index, op] of group.shown.unused.entries()) rows.push({ kind: "unused", key: `${group.key}//unused ${index}`, level: level + 1, parent: at, op });
  }

  /** @param {string} key */
  isOpen(key) {
    return this.state.toggled.get(key) ?? this.unfolded.has(key);
  }

  // --- groups --------------------------------------------------------------------------------------------------------

  /** The groups in one. @param {Group} group */
  inside(group) {
    if (group.layers.length > 0 && this.state.apart.has(group.key)) return group.layers.map((layer) => this.group([layer], group, group.prefix));
    return this.groups(group.shown.children, group);
  }

  /** @param {Branch[]} siblings @param {Group | null} parent */
  groups(siblings, parent) {
    return runs(siblings, this.folds).filter(([first]) => this.isShown(first)).map((run) => this.group(run, parent, ""));
  }

  /** @param {Branch[]} run @param {Group | null} parent @param {string} prefix @returns {Group} */
  group(run, parent, prefix) {
    const [first] = run;
    const name = run.length > 1 ? `${prefix}${first.name} … ${prefix}${run[run.length - 1].name}` : prefix + (first.name || first.type);
    const key = `${parent?.key ?? ""}/${prefix}${run.length > 1 ? "*" + first.name : first.name}`;
    const layers = run.length > 1 ? run : [];
    const shown = run.find((one) => this.holders.has(one)) ?? run.find((one) => one.name === this.state.shown.get(key)) ?? first;
    const members = counterparts(run, parent);
    const made = { key, name, prefix, members, shown, layers, sums: members.reduce((sum, one) => add(sum, one.sums), nothing()) };
    return this.elided(made, prefix) ?? made;
  }

  /** A mere list of identical layers has no row of its own. @param {Group} group @param {string} prefix */
  elided(group, prefix) {
    const { shown } = group;
    if (group.layers.length > 0 || shown.type || shown.values.length > 0) return null;
    const [run, ...more] = runs(shown.children, this.folds);
    return run?.length > 1 && more.length === 0 ? this.group(run, group, `${prefix}${shown.name}.`) : null;
  }

  /** @param {Branch} one */
  isShown(one) {
    return one.kind === "module" || one.unused.length > 0 || one.own.ops[0] > 0 || one.own.ops[1] > 0 || one.values.some((name) => this.isVisible(name));
  }

  /** What is open before the reader touched anything: the way to folded layers, else as much as fits on one screen. */
  unfoldedAtFirst() {
    const queue = this.groups(this.tree.top, null);
    const layered = this.tree.top.some((one) => this.hasFold(one));
    /** @type {Set<string>} */
    const open = new Set();
    let count = queue.length;
    for (let group = queue.shift(); group; group = queue.shift()) {
      const { shown, layers, key } = group;
      if (layered && layers.length === 0 && !this.hasFold(shown)) continue;
      const inside = this.groups(shown.children, group);
      const more = inside.length + (inside.length ? 0 : this.pairs(shown).length + shown.unused.length);
      const isRoot = shown.parent === null && shown.kind === "module";
      if (count + more > SCREEN && !isRoot) continue;
      open.add(key);
      count += more;
      // One level of a folded layer says what it is made of.
      if (layers.length === 0) queue.push(...inside);
    }
    return open;
  }

  /** @param {Branch} one @returns {boolean} */
  hasFold(one) {
    let known = this.withFold.get(one);
    if (known === undefined) {
      const inside = runs(one.children, this.folds);
      known = inside.some((run) => run.length > 1) || one.children.some((child) => this.hasFold(child));
      this.withFold.set(one, known);
    }
    return known;
  }

  // --- values --------------------------------------------------------------------------------------------------------

  /** @param {string} name */
  isVisible(name) {
    return name === this.state.selected || this.isListed(name);
  }

  /** Whether a value has a row without being selected. @param {string} name */
  isListed(name) {
    const { options } = this.state;
    const value = this.values[name];
    if (value.op === "placeholder" || (value.removed && !options.removed)) return false;
    return options.views || value.time_us[value.removed ? 0 : 1] !== null;
  }

  /** Forward values beside their backward twins, row by row; last the backward ones that have no twin here, and the update's. @param {Branch} one @returns {[string, string][]} */
  pairs(one) {
    const visible = one.values.filter((name) => this.isVisible(name));
    const phase = (/** @type {string} */ wanted) => visible.filter((name) => this.values[name].phase === wanted);
    const backward = new Set(phase("backward"));
    /** @type {Map<string, { left: string[], right: string[] }>} */
    const rows = new Map();
    for (const name of phase("forward")) {
      const { twins } = this.values[name];
      const row = rows.get(twins[0] ?? name) ?? { left: [], right: twins.map((twin) => computedBy(twin, this.values)).filter((twin) => backward.delete(twin)) };
      row.left.push(name);
      rows.set(twins[0] ?? name, row);
    }
    const alone = [...backward].map((name) => /** @type {[string, string]} */ (["", name]));
    const late = phase("update").map((name) => /** @type {[string, string]} */ ([name, ""]));
    return [...rows.values()].flatMap(({ left, right }) => zipped(left, right)).concat(alone, late);
  }

  // --- the way to a value --------------------------------------------------------------------------------------------

  /** Keys of the groups around a module or line and of its own, outermost first. @param {Branch} branch @returns {string[]} */
  wayTo(branch) {
    const around = withParents(branch, new Set());
    const keys = [];
    let groups = this.groups(this.tree.top, null);
    for (;;) {
      const next = groups.find((group) => group.members.some((one) => around.has(one)));
      if (!next) return keys;
      keys.push(next.key);
      groups = this.inside(next);
    }
  }
}

/** The op behind a value: one result of several is no op of its own. @param {string} name @param {Record<string, Value>} values */
export function computedBy(name, values) {
  const value = values[name];
  return value?.op === "getitem" && value.reads.length > 0 ? value.reads[0] : name;
}

/** The modules and lines around some values. @param {Tree} tree @param {Iterable<string>} names @returns {Set<Branch>} */
export function holders({ home }, names) {
  /** @type {Set<Branch>} */
  const found = new Set();
  for (const name of names) withParents(home.get(name) ?? null, found);
  return found;
}

/** @param {Branch | null} one @param {Set<Branch>} found */
function withParents(one, found) {
  for (; one && !found.has(one); one = one.parent) found.add(one);
  return found;
}

/** What `run` is in each layer that `parent` stands for. @param {Branch[]} run @param {Group | null} parent */
function counterparts(run, parent) {
  if (!parent || parent.members.length < 2) return run;
  const names = new Set(run.map((one) => one.name));
  // Layers listed one by one are members of the fold themselves.
  if (parent.layers.includes(run[0])) return parent.members.filter((one) => names.has(one.name));
  return parent.members.flatMap((member) => member.children.filter((child) => names.has(child.name) && child.kind === run[0].kind));
}

/** @param {string[]} left @param {string[]} right @returns {[string, string][]} */
function zipped(left, right) {
  return Array.from({ length: Math.max(left.length, right.length) }, (_, at) => [left[at] ?? "", right[at] ?? ""]);
}
