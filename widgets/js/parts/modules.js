// The trace as a tree: nn.Modules by their paths, the lines of code in them, and values as leaves. It needs no DOM.

/** Before and after the passes. @typedef {[number, number]} Pair */

/**
 * Ops that do work, their µs in each phase, and the bytes that are saved for the backward after the passes.
 * @typedef {{ ops: Pair, forward: Pair, backward: Pair, update: Pair, saved: number }} Sums
 */

/**
 * A module, or a line of code in one that has modules inside too.
 * @typedef {object} Branch
 * @property {"module" | "line"} kind
 * @property {string} name the last part of a module's path, or the line
 * @property {string} path
 * @property {string} type
 * @property {Branch | null} parent
 * @property {Branch[]} children in the order in which the program first gets there
 * @property {string[]} values its own, in the order of the program; those of a module with children are in its lines
 * @property {Unused[]} unused what it computed and nothing used: in no sum
 * @property {Sums} own without the modules inside
 * @property {Sums} sums
 * @property {number} rank
 * @property {number} structure equal for modules of equal types, lines and captured ops
 */

/** @typedef {{ top: Branch[], home: Map<string, Branch>, modules: Branch[], total: Sums }} Tree */

const NUMBERED = /^\d+$/;

/** @returns {Sums} */
export const nothing = () => ({ ops: [0, 0], forward: [0, 0], backward: [0, 0], update: [0, 0], saved: 0 });

/** @param {Sums} into @param {Sums} more */
export function add(into, more) {
  for (const at of /** @type {const} */ ([0, 1])) {
    into.ops[at] += more.ops[at];
    into.forward[at] += more.forward[at];
    into.backward[at] += more.backward[at];
    into.update[at] += more.update[at];
  }
  into.saved += more.saved;
  return into;
}

/** µs of a step, after the passes unless `at` is 0. @param {Sums} sums @param {0 | 1} [at] */
export const time = (sums, at = 1) => sums.forward[at] + sums.backward[at] + sums.update[at];

/** @param {Value} value @returns {Sums} */
function sumsOf(value) {
  const us = /** @type {Pair} */ (value.time_us.map((one) => one ?? 0));
  const ops = /** @type {Pair} */ (value.time_us.map((one) => (one === null ? 0 : 1)));
  return { ...nothing(), ops, [value.phase]: us, saved: value.removed ? 0 : value.saved_bytes };
}

/** Each value's place in the program: that of the capture, and new ones where the passes put them. @param {Pick<Payload, "memory">} payload */
export function ranks({ memory }) {
  const rank = new Map(memory.before.ops.map((name, at) => [name, at]));
  let last = 0;
  for (const name of memory.after.ops) {
    last = rank.get(name) ?? last + 1e-6;
    rank.set(name, last);
  }
  return rank;
}

/** "+", "−" or "~" of the values that the passes added, removed or changed. @param {Payload} payload @returns {Map<string, "+" | "-" | "~">} */
export function changes({ forward, backward, update, values }) {
  const found = new Map();
  for (const line of [forward, backward, update].flatMap((part) => part?.lines ?? [])) {
    if (line.kind === "op" && line.diff !== " " && line.diff !== "-") found.set(line.value, line.diff);
  }
  for (const [name, value] of Object.entries(values)) if (value.removed) found.set(name, "-");
  return found;
}

/** @param {Payload} payload @returns {Tree} */
export function buildTree(payload) {
  const rank = ranks(payload);
  const root = branch("module", "", "", null);
  const outside = branch("module", "", "", null);
  const modules = new Map([["", root]]);
  for (const [name, value] of Object.entries(payload.values)) if (value.op !== "placeholder") homeOf(value, modules, outside).values.push(name);
  for (const [name, value] of Object.entries(payload.values)) if (value.op === "placeholder") owner(value, modules, outside).values.push(name);
  for (const one of payload.unused.ops) homeOf(one, modules, outside).unused.push(one);
  /** @type {Tree} */
  const tree = { top: [], home: new Map(), modules: [], total: nothing() };
  const context = { payload, rank, structures: new Map(), tree };
  // Where the model has no name, others stand beside it: what has a name is no part of what has none.
  const beside = root.children.filter(({ path }) => !root.type || payload.roots.some((name) => `${name}.`.startsWith(`${path}.`)));
  root.children = root.children.filter((one) => !beside.includes(one));
  for (const one of [root, ...beside, outside]) finish(one, context);
  splitLines(outside, context);
  tree.top = [...(root.type ? [root] : []), ...beside, ...outside.children].sort(byRank);
  for (const one of tree.top) {
    one.parent = null;
    add(tree.total, one.sums);
  }
  return tree;
}

/** @param {"module" | "line"} kind @param {string} name @param {string} path @param {Branch | null} parent @returns {Branch} */
function branch(kind, name, path, parent) {
  return { kind, name, path, type: "", parent, children: [], values: [], unused: [], own: nothing(), sums: nothing(), rank: Infinity, structure: 0 };
}

/** @param {Value | Unused} value @param {Map<string, Branch>} modules @param {Branch} outside */
function homeOf(value, modules, outside) {
  if (!value.module && !value.module_type) return outside;
  const found = ensure(value.module, modules);
  found.type ||= value.module_type;
  return found;
}

/** A parameter's module, where any op ran in it. @param {Value} value @param {Map<string, Branch>} modules @param {Branch} outside */
function owner({ of }, modules, outside) {
  const path = of.slice(0, Math.max(0, of.lastIndexOf(".")));
  return (path && modules.get(path)) || outside;
}

/** @param {string} path @param {Map<string, Branch>} modules @returns {Branch} */
function ensure(path, modules) {
  const known = modules.get(path);
  if (known) return known;
  const cut = path.lastIndexOf(".");
  const parent = ensure(path.slice(0, Math.max(0, cut)), modules);
  const made = branch("module", path.slice(cut + 1), path, parent);
  parent.children.push(made);
  modules.set(path, made);
  return made;
}

/** @param {Branch} one @param {Branch} other */
const byRank = (one, other) => one.rank - other.rank || (one.name < other.name ? -1 : 1);

/** @typedef {{ payload: Payload, rank: Map<string, number>, structures: Map<string, number>, tree: Tree }} Context */

/** Sums, order and structure from the leaves up. @param {Branch} one @param {Context} context */
function finish(one, context) {
  const { payload, rank, tree } = context;
  const place = (/** @type {string} */ name) => rank.get(name) ?? Infinity;
  for (const child of one.children) finish(child, context);
  one.values.sort((a, b) => place(a) - place(b) || 0);
  for (const name of one.values) {
    tree.home.set(name, one);
    add(one.own, sumsOf(payload.values[name]));
  }
  add(one.sums, one.own);
  for (const child of one.children) add(one.sums, child.sums);
  if (one.children.length > 0) splitLines(one, context);
  one.rank = Math.min(one.values.length ? place(one.values[0]) : Infinity, ...one.children.map((child) => child.rank));
  one.children.sort(byRank);
  one.structure = structureOf(one, context);
  if (one.kind === "module" && (one.path || one.type)) tree.modules.push(one);
}

/** Move the values of a module with modules inside to lines among those. @param {Branch} one @param {Context} context */
function splitLines(one, context) {
  /** @type {Map<string, Branch>} */
  const lines = new Map();
  const lineOf = (/** @type {Value | Unused} */ { source, op }) => {
    const text = source || (op === "placeholder" ? "inputs" : "no line of the program");
    const line = lines.get(text) ?? branch("line", text, one.path, one);
    lines.set(text, line);
    return line;
  };
  for (const name of one.values) lineOf(context.payload.values[name]).values.push(name);
  for (const each of one.unused) lineOf(each).unused.push(each);
  one.values = [];
  one.unused = [];
  for (const line of lines.values()) finish(line, context);
  for (const line of lines.values()) if (line.rank === Infinity) line.rank = before(line, lines.values());
  one.children.push(...lines.values());
  one.children.sort(byRank);
}

/** "gpt.py:69" of "src/gpt.py:69  place = torch.arange(…)"; "" of what is no line. @param {string} line */
export const placeOf = (line) => /^.*:\d+$/.exec(line.split("  ")[0])?.[0].split("/").pop() ?? "";

const number = (/** @type {Branch} */ line) => Number(/:(\d+)  /.exec(line.name)?.[1]);

/** The place of a line of which nothing is used: before the next one of the text. @param {Branch} line @param {Iterable<Branch>} lines */
function before(line, lines) {
  const next = [...lines].filter((one) => number(one) > number(line)).map(({ rank }) => rank);
  return Math.min(...next) - 1e-7;
}

/**
 * By what was captured, whatever the passes made of it: identical layers stay together when one of them is optimised in
 * another way. @param {Branch} one @param {Context} context
 */
function structureOf(one, { payload, structures }) {
  const ops = one.values.filter((name) => payload.values[name].time_us[0] !== null).map((name) => `${payload.values[name].phase[0]} ${payload.values[name].type}`);
  const inside = one.children.filter((child) => child.kind === "module" || child.own.ops[0] > 0).map((child) => `${child.name}=${child.structure}`);
  const text = JSON.stringify([one.kind, one.type, ops.sort(), inside.sort()]);
  const id = structures.get(text) ?? structures.size + 1;
  structures.set(text, id);
  return id;
}

/** Siblings, those that are numbered, adjacent and identical together. @param {Branch[]} siblings @param {boolean} fold @returns {Branch[][]} */
export function runs(siblings, fold) {
  /** @type {Branch[][]} */
  const found = [];
  for (const one of siblings) {
    const last = found.at(-1);
    if (fold && last && isLayer(one) && isLayer(last[0]) && one.structure === last[0].structure) last.push(one);
    else found.push([one]);
  }
  return found;
}

/** @param {Branch} one */
const isLayer = (one) => one.kind === "module" && NUMBERED.test(one.name);

/** What is told to be slow: modules, or a line of what is in none or outermost. @param {Tree} tree @param {Payload["slowest"]} slowest @returns {Branch[]} */
export function slowestIn({ top, modules }, slowest) {
  if (!slowest) return [];
  const { paths, name } = slowest;
  return paths.length > 0 ? modules.filter(({ path }) => paths.includes(path)) : top.flatMap((one) => [one, ...one.children]).filter((one) => one.kind === "line" && one.name === name);
}

/** Middle and largest time of layers. @param {Branch[]} layers */
export function spread(layers) {
  const sorted = [...layers].sort((one, other) => time(one.sums) - time(other.sums));
  const middle = sorted.length / 2;
  const median = (time(sorted[Math.ceil(middle) - 1].sums) + time(sorted[Math.floor(middle)].sums)) / 2;
  return { median, slowest: sorted[sorted.length - 1] };
}
