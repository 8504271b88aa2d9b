// The content of the graph: ops that do work, the modules that hold them, and who reads whom. It needs no DOM.

/**
 * An op, with the views and the single outputs that were folded into it.
 * @typedef {object} Op
 * @property {string} name its value
 * @property {Value} value
 * @property {number} rank its place in the program
 * @property {Module} module
 * @property {string[]} items names of what was folded into it
 * @property {Op[]} inputs
 * @property {Op[]} readers
 */

/**
 * An nn.Module with the ops that run in it and in none of its children.
 * @typedef {object} Module
 * @property {string} path
 * @property {string} type
 * @property {Module | null} parent
 * @property {Module[]} children in the order in which the forward gets there
 * @property {Op[]} ops its own, in the order of the program
 * @property {number} size shown ops in it and its children
 * @property {boolean} isBare none of its values is its own
 * @property {number} first rank of its first value in the forward, its children's included
 * @property {number} last rank of its last value in the backward: what is recomputed for others may come long before
 * @property {string[]} captured what of its own was captured, as text
 * @property {number} structure equal for modules of which the same was captured
 * @property {number} form equal for modules whose shown ops are the same too
 */

/** `update` holds the ops of the update as a module would. @typedef {{ root: Module, update: Module, ops: Op[], host: Map<string, Op> }} Program */

/** Siblings of which the same was captured, shown as one of them. @typedef {{ members: Module[], forms: number }} Run */

const NUMBERED = /(^|\.)\d+$/;

/**
 * @param {Payload} payload @param {{ views: boolean, removed: boolean }} shown whether views are ops of their own, and removed ops
 * are there
 * @returns {Program}
 */
export function buildProgram(payload, shown) {
  const { values } = payload;
  const rank = ranks(payload);
  const captured = new Set(payload.memory.before.ops);
  const hasTimes = Object.values(values).some(({ time_us }) => time_us[0] !== null || time_us[1] !== null);
  /** @type {Map<string, Module>} */
  const modules = new Map([["", newModule("", null)]]);
  /** @type {Program} */
  const program = { root: ensure("", modules), update: { ...newModule("the update", null), type: "of the parameters" }, ops: [], host: new Map() };
  const names = Object.keys(values).filter((name) => values[name].op !== "placeholder");
  names.sort((one, other) => (rank.get(one) ?? 0) - (rank.get(other) ?? 0));
  /** Of a view, when its memory was made. @type {Map<string, number>} */
  const made = new Map();
  for (const name of names) {
    const value = values[name];
    const module = value.phase === "update" ? program.update : ensure(value.module, modules);
    const at = rank.get(name) ?? 0;
    const isView = value.op === "getitem" || (hasTimes && value.time_us[value.removed ? 0 : 1] === null && !value.kernel);
    made.set(name, (isView ? made.get(value.reads[0]) : undefined) ?? at);
    module.type ||= value.module_type;
    if (captured.has(name)) module.captured.push(`${value.phase[0]} ${value.type}`);
    if (value.phase === "forward") extend(module, { first: at });
    else extend(module, value.removed ? {} : { last: made.get(name) });
    if ((value.removed && !shown.removed) || (isView && !shown.views)) continue;
    const op = { name, value, rank: at, module, items: [], inputs: [], readers: [] };
    module.ops.push(op);
    program.ops.push(op);
    program.host.set(name, op);
  }
  foldViews(names, values, program);
  connect(values, program);
  finish(program.root, new Map());
  finish(program.update, new Map());
  return program;
}

/** @param {string} path @param {Module | null} parent @returns {Module} */
function newModule(path, parent) {
  return { path, type: "", parent, children: [], ops: [], size: 0, isBare: true, first: Infinity, last: -Infinity, captured: [], structure: 0, form: 0 };
}

/** @param {string} path @param {Map<string, Module>} modules @returns {Module} */
function ensure(path, modules) {
  const known = modules.get(path);
  if (known) return known;
  const parent = ensure(path.slice(0, Math.max(0, path.lastIndexOf("."))), modules);
  const made = newModule(path, parent);
  parent.children.push(made);
  modules.set(path, made);
  return made;
}

/** Places in the optimised program; what was removed comes right after what it came after. @param {Pick<Payload, "memory">} payload */
function ranks({ memory }) {
  const rank = new Map(memory.after.ops.map((name, at) => [name, at]));
  let last = -1;
  for (const name of memory.before.ops) {
    last = rank.get(name) ?? last + 1e-6;
    rank.set(name, last);
  }
  return rank;
}

/** @param {Module} module @param {{ first?: number, last?: number }} by ranks */
function extend(module, { first = Infinity, last = -Infinity }) {
  module.isBare = false;
  for (let one = /** @type {Module | null} */ (module); one; one = one.parent) {
    one.first = Math.min(one.first, first);
    one.last = Math.max(one.last, last);
  }
}

/**
 * A view belongs to the op that made its memory, in whichever half that is; a view of an input to its first reader.
 * @param {string[]} names in the program's order @param {Record<string, Value>} values @param {Program} program
 */
function foldViews(names, values, { host }) {
  for (const name of names) {
    const source = host.has(name) ? undefined : host.get(values[name].reads[0] ?? "");
    if (source?.value.removed !== values[name].removed) continue;
    source.items.push(name);
    host.set(name, source);
  }
  for (const name of [...names].reverse()) {
    const reader = host.has(name) ? undefined : host.get(values[name].uses[0] ?? "");
    if (reader?.value.removed === values[name].removed) host.set(name, reader);
  }
}

/** @param {Record<string, Value>} values @param {Program} program */
function connect(values, { ops, host }) {
  for (const op of ops) {
    const inputs = new Set(op.value.reads.map((name) => (values[name]?.op === "placeholder" ? undefined : host.get(name))));
    for (const input of inputs) {
      if (!input || input === op) continue;
      op.inputs.push(input);
      input.readers.push(op);
    }
  }
}

/** Sizes, order and structure, from the leaves up. @param {Module} module @param {Map<string, number>} known numbers of structures */
function finish(module, known) {
  const { children } = module;
  for (const child of children) finish(child, known);
  module.size = module.ops.length + children.reduce((sum, child) => sum + child.size, 0);
  children.sort(byPlace);
  const inside = (/** @type {"structure" | "form"} */ what) => children.map((child) => `${lastPart(child.path)}=${child[what]}`).sort();
  const ops = module.ops.map(({ value }) => `${value.phase} ${value.op} ${value.type}`);
  module.structure = number(JSON.stringify([module.type, module.captured.sort(), inside("structure")]), known);
  module.form = number(JSON.stringify([ops, inside("form")]), known);
  module.children = children.flatMap((child) => (isWrapper(child) ? child.children : [child]));
  for (const child of module.children) child.parent = module;
}

/** @param {string} text @param {Map<string, number>} known */
function number(text, known) {
  const found = known.get(text) ?? known.size;
  known.set(text, found);
  return found;
}

/** In the forward's order; what is only in the backward comes where the backward, which flows up, gets there. @param {Module} one @param {Module} other */
function byPlace(one, other) {
  const isForward = one.first !== Infinity && other.first !== Infinity;
  return (isForward ? one.first - other.first : other.last - one.last) || 0;
}

/** A list of equal layers, or what has one child and nothing else: a box around it says nothing. @param {Module} module */
function isWrapper({ isBare, children }) {
  return isBare && (children.length === 1 || (children.length > 1 && runsOf(children, true).length === 1));
}

/** How many modules are in each other. @param {Module} module @returns {number} */
export function levels({ children }) {
  return children.reduce((most, child) => Math.max(most, 1 + levels(child)), 0);
}

/** @param {string} path */
export const lastPart = (path) => path.slice(path.lastIndexOf(".") + 1);

/** Siblings that are numbered, adjacent and captured alike, together. @param {Module[]} siblings @param {boolean} fold @returns {Run[]} */
export function runsOf(siblings, fold) {
  /** @type {Module[][]} */
  const found = [];
  for (const one of siblings) {
    const last = found.at(-1);
    const isLike = last && fold && NUMBERED.test(one.path) && NUMBERED.test(last[0].path) && one.structure === last[0].structure;
    if (isLike) last.push(one);
    else found.push([one]);
  }
  return found.map((members) => ({ members, forms: new Set(members.map(({ form }) => form)).size }));
}

/** A member of the commonest form; the second, if it can be, since the ends of a stack are optimised in other ways. @param {Run} run */
export function representative({ members }) {
  const count = (/** @type {Module} */ one) => members.filter(({ form }) => form === one.form).length;
  const first = members[Math.min(1, members.length - 2)] ?? members[0];
  return members.reduce((best, one) => (count(one) > count(best) ? one : best), first);
}

/** The ops of a module and of all modules inside. @param {Module} module @returns {Op[]} */
export function opsIn(module) {
  return [...module.ops, ...module.children.flatMap(opsIn)];
}

/** @param {Module | null} module @param {(one: Module) => boolean} is @returns {Module | null} the innermost of it and its parents */
export function nearest(module, is) {
  let one = module;
  while (one && !is(one)) one = one.parent;
  return one;
}
