// The layout of the graph: the forward flows down at the left, the backward up at the right, so that twins face each other, and
// an update down beside them, in a box of its own, which is closed at first.
// A module is a band across both. In it, its own ops and the modules inside alternate as the program gets to them; own ops
// between two such modules are in layers by who reads whom. Nothing depends on what was laid out before.

import { levels, nearest, opsIn, representative, runsOf } from "./modules.js";

/** @typedef {import("./modules.js").Op} Op @typedef {import("./modules.js").Module} Module @typedef {import("./modules.js").Run} Run */
/** @typedef {Value["phase"]} Phase */

/**
 * An op, or one half of a collapsed module. Its place is that of its upper left corner.
 * @typedef {object} Node
 * @property {string} id of an op its value, of a module `path|phase`
 * @property {Phase} phase
 * @property {Op[]} ops
 * @property {Box | null} module the collapsed one
 * @property {Set<Node>} inputs in the same half
 * @property {Set<Node>} readers in the same half
 * @property {Set<Node>} saved across the halves: readers of a forward node, what a backward node reads
 * @property {number} x @property {number} y @property {number} w @property {number} h
 */

/**
 * A module, or identical ones of which one is shown.
 * @typedef {object} Box
 * @property {Module} module
 * @property {Module[]} members
 * @property {number} forms how many different programs the members are
 * @property {boolean} isOpen
 * @property {number} level 1 for the outermost
 * @property {number} x @property {number} y @property {number} w @property {number} h
 */

/** A line from a lower or upper edge to another. @typedef {{ from: Node | Box, to: Node | Box, phase: Phase }} Edge */
/** @typedef {{ nodes: Map<string, Node>, boxes: Box[], edges: Edge[], links: [Node, Node][], axes: Record<Phase, number>, x: number, w: number, h: number, nodeOf: Map<Op, Node> }} Layout */

/**
 * `opened` and `closed` are paths of modules that differ from what `depth` says; `shown` are members of folded runs to be shown
 * instead of the commonest.
 * @typedef {{ depth: number, opened: Set<string>, closed: Set<string>, fold: boolean, shown: Set<string> }} Folding
 */

export const NODE = { w: 160, h: 50 };
const GAP = { x: 14, y: 22, columns: 48 };
const PAD = { side: 12, top: 26, bottom: 12, around: 32 };
const WIDEST = 4;
/** From left to right. */
export const PHASES = /** @type {const} */ (["forward", "backward", "update"]);

/** @param {import("./modules.js").Program} program @param {Folding} folding @returns {Layout} */
export function layOut(program, folding) {
  /** @type {Layout} */
  const layout = { nodes: new Map(), boxes: [], edges: [], links: [], axes: { forward: 0, backward: 0, update: NaN }, x: 0, w: 0, h: 0, nodeOf: new Map() };
  const root = measure(program.root, 0, folding, layout);
  layout.axes.backward = (root.widths.forward + root.widths.backward) / 2 + GAP.columns;
  layout.x = -root.widths.forward / 2 - PAD.around;
  layout.w = root.widths.forward + root.widths.backward + GAP.columns + 2 * PAD.around;
  layout.h = root.height;
  place(root.rows, 0, layout.axes);
  // As deep as the innermost modules, and never open at first: it has an op for each parameter, or many.
  for (const column of childBand({ members: [program.update], forms: 1 }, Math.max(2, levels(program.root)), folding, layout)) placeUpdate(column, root.widths.backward, layout);
  connect(program.ops, hidden(layout.boxes), layout);
  return layout;
}

/** Right of the backward. @param {Band} column @param {number} width of the backward @param {Layout} layout */
function placeUpdate(column, width, layout) {
  layout.axes.update = layout.axes.backward + (width + column.widths.update) / 2 + GAP.columns;
  layout.w += column.widths.update + GAP.columns;
  layout.h = Math.max(layout.h, column.height);
  place([column], 0, layout.axes);
}

/** Whether a module, of folded ones the first, is shown with what is inside. @param {Module} module @param {number} level @param {Folding} folding */
export function isOpen({ path }, level, { depth, opened, closed }) {
  return opened.has(path) || (level < depth && !closed.has(path));
}

/** Show another one of folded layers, with the same modules open in it. @param {Box} box @param {Module} member @param {Folding} folding */
export function showMember({ members, module }, member, { opened, closed, shown }) {
  for (const { path } of members) shown.delete(path);
  shown.add(member.path);
  for (const paths of [opened, closed]) {
    for (const path of [...paths]) if (path.startsWith(`${module.path}.`)) paths.add(member.path + path.slice(module.path.length));
  }
}

// --- sizes ---------------------------------------------------------------------------------------------------------------

/** What stands in one band of a module. @typedef {{ height: number, widths: Record<Phase, number>, nodes: Node[], box: Box | null, rows: Band[] }} Band */

/** @param {Module} module @param {number} level @param {Folding} folding @param {Layout} layout @returns {Band} */
function measure(module, level, folding, layout) {
  const runs = runsOf(module.children, folding.fold);
  const gaps = split(module, runs);
  /** @type {Band[]} */
  const rows = [];
  for (const [at, ops] of gaps.entries()) {
    if (ops.length > 0) rows.push(layered(ops, layout));
    if (at < runs.length) rows.push(...childBand(runs[at], level + 1, folding, layout));
  }
  return { ...stack(rows), nodes: [], box: null, rows };
}

/** @param {Band[]} rows */
function stack(rows) {
  const height = rows.reduce((sum, row) => sum + row.height, 0) + GAP.y * Math.max(0, rows.length - 1);
  const widest = (/** @type {Phase} */ phase) => Math.max(NODE.w, ...rows.map(({ widths }) => widths[phase]));
  return { height, widths: { forward: widest("forward"), backward: widest("backward"), update: Math.max(0, ...rows.map(({ widths }) => widths.update)) } };
}

/** The module's own ops before, between and after what is inside it. @param {Module} module @param {Run[]} runs @returns {Op[][]} */
function split({ ops }, runs) {
  const firsts = runs.map(({ members }) => Math.min(...members.map(({ first }) => first)));
  const lasts = runs.map(({ members }) => Math.max(...members.map(({ last }) => last)));
  /** @type {Op[][]} */
  const gaps = Array.from({ length: runs.length + 1 }, () => []);
  for (const op of ops) {
    // What runs later in the backward stands above.
    const at = op.value.phase === "forward" ? after(firsts, (first) => first < op.rank) : after(lasts, (last) => last > op.rank);
    gaps[at].push(op);
  }
  return gaps;
}

/** The index after the last that `is`. @template T @param {T[]} list @param {(one: T) => boolean} is */
function after(list, is) {
  let at = list.length;
  while (at > 0 && !is(list[at - 1])) at -= 1;
  return at;
}

/** @param {Run} run @param {number} level @param {Folding} folding @param {Layout} layout @returns {Band[]} */
function childBand(run, level, folding, layout) {
  if (run.members.every(({ size }) => size === 0)) return [];
  const module = run.members.find(({ path }) => folding.shown.has(path)) ?? representative(run);
  /** @type {Box} */
  const box = { module, ...run, isOpen: isOpen(run.members[0], level, folding), level, x: 0, y: 0, w: 0, h: 0 };
  layout.boxes.push(box);
  if (!box.isOpen) return [collapsed(box, layout)];
  const inside = measure(module, level, folding, layout);
  const widths = { ...inside.widths };
  for (const phase of PHASES) widths[phase] += widths[phase] && 2 * PAD.side;
  return [{ ...inside, height: inside.height + PAD.top + PAD.bottom, widths, box }];
}

/** @param {Box} box @param {Layout} layout @returns {Band} */
function collapsed(box, layout) {
  const ops = box.members.flatMap(opsIn);
  const halves = PHASES.map((phase) => ({ phase, ops: ops.filter(({ value }) => value.phase === phase) }));
  const nodes = halves.filter((half) => half.ops.length > 0).map((half) => node(`${box.module.path}|${half.phase}`, half.phase, half.ops, box, layout));
  return { height: NODE.h, widths: { forward: NODE.w, backward: NODE.w, update: nodes[0].phase === "update" ? NODE.w : 0 }, nodes, box: null, rows: [] };
}

/** @param {string} id @param {Phase} phase @param {Op[]} ops @param {Box | null} module @param {Layout} layout @returns {Node} */
function node(id, phase, ops, module, layout) {
  const made = { id, phase, ops, module, inputs: new Set(), readers: new Set(), saved: new Set(), x: -NODE.w / 2, y: 0, ...NODE };
  layout.nodes.set(id, made);
  for (const op of ops) layout.nodeOf.set(op, made);
  return made;
}

/** Each phase of some ops in layers. @param {Op[]} ops @param {Layout} layout @returns {Band} */
function layered(ops, layout) {
  const halves = PHASES.map((phase) => ops.filter(({ value }) => value.phase === phase)).map((some) => ({ some, rows: inRows(layers(some)) }));
  const count = Math.max(...halves.map(({ rows }) => rows.length));
  const height = count * (NODE.h + GAP.y) - GAP.y;
  const widths = { forward: 0, backward: 0, update: 0 };
  for (const [at, phase] of PHASES.entries()) {
    const { some, rows } = halves[at];
    const columns = Math.max(0, ...rows.map((row) => row.length));
    widths[phase] = columns * (NODE.w + GAP.x) - GAP.x;
    for (const op of some) node(op.name, phase, [op], null, layout);
    // The shorter half stands in the middle of the other one.
    const start = Math.floor((count - rows.length) / 2);
    for (const [index, row] of rows.entries()) {
      const from = start + index;
      arrange(row, columns, (phase === "backward" ? count - 1 - from : from) * (NODE.h + GAP.y), layout);
    }
  }
  return { height, widths, nodes: ops.map((op) => /** @type {Node} */ (layout.nodeOf.get(op))), box: null, rows: [] };
}

/** Each op one layer after the last of its inputs among `ops`. @param {Op[]} ops in the order of the program */
function layers(ops) {
  /** @type {Map<Op, number>} */
  const layer = new Map();
  /** @type {Op[][]} */
  const found = [];
  for (const op of ops) {
    let at = 0;
    for (const input of op.inputs) at = Math.max(at, (layer.get(input) ?? -1) + 1);
    layer.set(op, at);
    (found[at] ??= []).push(op);
  }
  return found;
}

/** @param {Op[][]} all */
function inRows(all) {
  return all.flatMap((layer) => Array.from({ length: Math.ceil(layer.length / WIDEST) }, (_, at) => layer.slice(at * WIDEST, (at + 1) * WIDEST)));
}

/** A row near what it reads. @param {Op[]} row @param {number} columns @param {number} y @param {Layout} layout */
function arrange(row, columns, y, { nodeOf }) {
  const step = NODE.w + GAP.x;
  const peers = new Map(row.map((op) => [op, wish(op, nodeOf)]));
  const sorted = [...row].sort((one, other) => (peers.get(one) ?? 0) - (peers.get(other) ?? 0) || one.rank - other.rank);
  const middle = sorted.reduce((sum, op) => sum + (peers.get(op) ?? 0), 0) / row.length;
  const slack = ((columns - row.length) * step) / 2;
  const shift = Math.max(-slack, Math.min(slack, (Math.round((2 * middle) / step) * step) / 2));
  for (const [at, op] of sorted.entries()) {
    const found = /** @type {Node} */ (nodeOf.get(op));
    found.x = shift + (at - (row.length - 1) / 2) * step - NODE.w / 2;
    found.y = y;
  }
}

/** The middle of the inputs that stand already. @param {Op} op @param {Map<Op, Node>} nodeOf */
function wish(op, nodeOf) {
  const placed = op.inputs.filter((input) => input.value.phase === op.value.phase && input.module === op.module).map((input) => nodeOf.get(input)).filter((found) => found !== undefined);
  return placed.length ? placed.reduce((sum, found) => sum + found.x + NODE.w / 2, 0) / placed.length : 0;
}

// --- places --------------------------------------------------------------------------------------------------------------

/** From the top down. @param {Band[]} rows @param {number} top @param {Record<Phase, number>} axes */
function place(rows, top, axes) {
  for (const { height, nodes, box, rows: inside, widths } of rows) {
    for (const one of nodes) {
      one.x += axes[one.phase];
      one.y += top;
    }
    if (box) {
      const [first, last] = widths.update ? [PHASES[2], PHASES[2]] : PHASES;
      box.x = axes[first] - widths[first] / 2;
      box.w = axes[last] + widths[last] / 2 - box.x;
      box.y = top;
      box.h = height;
    }
    place(inside, top + (box ? PAD.top : 0), axes);
    top += height + GAP.y;
  }
}

// --- edges ---------------------------------------------------------------------------------------------------------------

/** Members of folded runs that another one stands for, and the box where that is. @param {Box[]} boxes @returns {Map<Module, Box>} */
function hidden(boxes) {
  const found = new Map();
  for (const box of boxes) for (const member of box.isOpen ? box.members : []) if (member !== box.module) found.set(member, box);
  return found;
}

/** @param {Op[]} ops @param {Map<Module, Box>} away @param {Layout} layout */
function connect(ops, away, layout) {
  /** Who stands for an op: its node, or the box whose shown member stands for its module. @type {(op: Op) => Node | Box | undefined} */
  const standIn = (op) => layout.nodeOf.get(op) ?? away.get(/** @type {Module} */ (nearest(op.module, (one) => away.has(one))));
  /** @type {Map<Node | Box, Set<Node | Box>>} */
  const seen = new Map();
  for (const op of ops) {
    const to = standIn(op);
    for (const input of to ? op.inputs : []) {
      const from = standIn(input);
      if (!from || !to || from === to) continue;
      const known = seen.get(from) ?? new Set();
      if (known.has(to)) continue;
      seen.set(from, known.add(to));
      join(from, to, input.value.phase, op.value.phase, layout);
    }
  }
}

/** @param {Node | Box} from @param {Node | Box} to @param {Phase} phase @param {Phase} other @param {Layout} layout */
function join(from, to, phase, other, { edges, links }) {
  if (phase === other) edges.push({ from, to, phase });
  if (isBox(from) || isBox(to)) return;
  if (phase === other) {
    from.readers.add(to);
    to.inputs.add(from);
    return;
  }
  links.push([from, to]);
  from.saved.add(to);
  to.saved.add(from);
}

/** @param {Node | Box} one @returns {one is Box} */
export const isBox = (one) => "members" in one;

/**
 * The node that shows a value, or the box of the folded layers that it is in. Null where the graph does not show it.
 * @param {string} value @param {import("./modules.js").Program} program @param {Layout} layout @returns {Node | null}
 */
export function nodeOfValue(value, program, layout) {
  const op = program.host.get(value);
  return (op && layout.nodeOf.get(op)) ?? null;
}

/** The folded layer that a value is in while another one is shown. @param {Op} op @param {Layout} layout @returns {Module | null} */
export function foldedLayer(op, { boxes }) {
  const away = hidden(boxes);
  return nearest(op.module, (one) => away.has(one));
}
