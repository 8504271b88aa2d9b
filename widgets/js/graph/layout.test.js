import assert from "node:assert/strict";
import test from "node:test";

import { layOut, nodeOfValue, foldedLayer } from "./layout.js";
import { buildProgram, runsOf } from "./modules.js";
import { Motion } from "./motion.js";
import { lines, shares, timeOf } from "./text.js";
import { boxAround, glyphAt, isOnGlyph, nodeAt, step } from "./walk.js";

const SHOWN = { views: false, removed: false };

/** Values from rows "name = op(read, read) @module", backward ones after a row "---"; "!" in front: removed; the update's after another "---". */
function payload(text) {
  const values = {};
  let phase = "forward";
  for (const row of text.trim().split("\n").map((one) => one.trim())) {
    if (row === "---") phase = phase === "forward" ? "backward" : "update";
    else add(values, row, phase);
  }
  for (const [name, value] of Object.entries(values)) for (const read of value.reads) values[read]?.uses.push(name);
  const live = (is) => Object.keys(values).filter((name) => values[name].op !== "placeholder" && is(values[name]));
  return { values, times: { before: "b", after: "modelled" }, memory: { before: { ops: live(({ kernel }) => !kernel) }, after: { ops: live(({ removed }) => !removed) } } };
}

function add(values, row, phase) {
  const [, mark, name, op, reads, module] = row.match(/^(!?)(\w+) = ([\w.]+)\(([^)]*)\)(?: @(\S+))?$/);
  const isFree = ["view", "getitem", "placeholder"].includes(op);
  const time = [isFree || op.startsWith("fused") ? null : 2, isFree || mark ? null : 2];
  const base = { op: op === "getitem" || op === "placeholder" ? op : `aten.${op}.default`, type: "f32[2]", nbytes: 8, phase, module: module ?? "", module_type: module ? "M" : "", twins: [] };
  values[name] = { ...base, reads: reads ? reads.split(", ") : [], uses: [], removed: mark === "!", kernel: op.startsWith("fused") ? op : "", time_us: time };
}

const folding = (more) => ({ depth: 2, opened: new Set(), closed: new Set(), fold: true, shown: new Set(), ...more });

function laidOut(text, more, shown = SHOWN) {
  const program = buildProgram(payload(text), shown);
  return { program, layout: layOut(program, folding(more)) };
}

const CHAIN = `
  x = placeholder()
  a = exp(x)
  b = view(a)
  c = sin(b)
  d = cos(c)
  ---
  gd = mul(d, c)
  gc = mul(gd, b)
`;

test("the forward flows down, the backward up beside it, and twins face each other", () => {
  const { layout } = laidOut(CHAIN);
  const [a, c, d, gd, gc] = ["a", "c", "d", "gd", "gc"].map((name) => layout.nodes.get(name));
  assert.ok(a.y < c.y && c.y < d.y);
  assert.ok(gc.y < gd.y);
  assert.ok(Math.min(gd.x, gc.x) >= Math.max(a.x, c.x, d.x) + d.w);
  assert.equal(layout.h, 3 * a.h + 2 * (c.y - a.y - a.h));
});

test("views are folded into what made their memory, and are ops of their own on request", () => {
  const { program, layout } = laidOut(CHAIN);
  assert.equal(layout.nodes.has("b"), false);
  assert.equal(nodeOfValue("b", program, layout), layout.nodes.get("a"));
  assert.deepEqual([...layout.nodes.get("c").inputs], [layout.nodes.get("a")]);
  assert.ok(laidOut(CHAIN, {}, { views: true, removed: false }).layout.nodes.has("b"));
});

test("a view of an input belongs to its reader", () => {
  const { program, layout } = laidOut("w = placeholder()\n t = view(w)\n a = mm(t)");
  assert.equal(nodeOfValue("t", program, layout), layout.nodes.get("a"));
  assert.equal(nodeOfValue("w", program, layout), null);
});

test("what crosses the halves is a link, and moves nothing", () => {
  const { layout } = laidOut(CHAIN);
  assert.deepEqual(layout.links.map(([from, to]) => [from.id, to.id]), [["c", "gd"], ["d", "gd"], ["a", "gc"]].sort((one, other) => (one[1] === "gd") - (other[1] === "gd")).reverse());
  assert.deepEqual([...layout.nodes.get("gc").saved].map(({ id }) => id), ["a"]);
  const without = laidOut(CHAIN.replace("mul(d, c)", "mul(x)").replace("mul(gd, b)", "mul(gd)")).layout;
  for (const [id, { x, y }] of layout.nodes) assert.deepEqual([id, without.nodes.get(id).x, without.nodes.get(id).y], [id, x, y]);
});

const LAYERS = (count) => {
  const layer = (at) => `n${at} = norm(${at ? `m${at - 1}` : "e"}) @h.${at}.norm\n m${at} = mm(n${at}) @h.${at}.mlp`;
  const back = (at) => `gm${at} = mm(${at + 1 < count ? `gn${at + 1}` : "g"}, n${at}) @h.${at}.mlp\n gn${at} = mul(gm${at}) @h.${at}.norm`;
  const all = Array.from({ length: count }, (_, at) => at);
  return `e = embedding()\n${all.map(layer).join("\n")}\nl = sum(m${count - 1})\n---\ng = ones()\n${all.reverse().map(back).join("\n")}\nge = sum(gn0)`;
};

test("identical layers are one, of which one is shown", () => {
  const { program, layout } = laidOut(LAYERS(4));
  const [run] = runsOf(program.root.children, true);
  assert.deepEqual([run.members.length, run.forms], [4, 1]);
  assert.deepEqual([...layout.nodes.keys()].sort(), ["e", "g", "ge", "h.1.mlp|backward", "h.1.mlp|forward", "h.1.norm|backward", "h.1.norm|forward", "l"]);
  const box = layout.boxes[0];
  const joined = layout.edges.filter(({ from, to }) => from === box || to === box).map(({ from, to }) => [from.id ?? "box", to.id ?? "box"].join(" ")).sort();
  assert.deepEqual(joined, ["box ge", "box h.1.mlp|backward", "box h.1.norm|forward", "box l", "e box", "g box", "h.1.mlp|forward box", "h.1.norm|backward box"]);
});

test("a collapsed module has a node in each half, side by side, with all of its ops", () => {
  const { layout } = laidOut(LAYERS(4), { depth: 1 });
  const [forward, backward] = [layout.nodes.get("h.1|forward"), layout.nodes.get("h.1|backward")];
  assert.equal(forward.y, backward.y);
  assert.deepEqual([forward.ops.length, timeOf(forward.ops)], [8, 16]);
  assert.deepEqual(lines(forward), ["h.1 ×4", " forward", "16.0 µs · 2 ops each"]);
});

test("another member of a folded run can be shown, and all without folding", () => {
  const { program, layout } = laidOut(LAYERS(4));
  assert.equal(foldedLayer(program.host.get("m3"), layout).path, "h.3");
  assert.equal(foldedLayer(program.host.get("m1"), layout), null);
  const shown = layOut(program, folding({ shown: new Set(["h.3"]) }));
  assert.equal(nodeOfValue("m3", program, shown).id, "h.3.mlp|forward");
  assert.equal(layOut(program, folding({ fold: false })).nodes.size, 4 + 4 * 4);
});

test("layers that the passes optimised in different ways stay together, and say so", () => {
  const changed = LAYERS(4).replace("n2 = norm(m1) @h.2.norm", "!n2 = norm(m1) @h.2.norm\n k2 = fused_norm(m1) @h.2.norm").replace("mm(n2)", "mm(k2)");
  const { layout } = laidOut(changed);
  assert.deepEqual([layout.boxes[0].members.length, layout.boxes[0].forms, layout.boxes[0].module.path], [4, 2, "h.1"]);
});

test("modules open and close one by one", () => {
  const { program, layout } = laidOut(LAYERS(2), { fold: false, opened: new Set(["h.0.mlp"]), closed: new Set(["h.1"]) });
  assert.ok(layout.nodes.has("m0") && layout.nodes.has("h.1|forward") && !layout.nodes.has("m1"));
  const { y, h } = layout.boxes.find(({ module }) => module.path === "h.0.mlp");
  const node = layout.nodes.get("m0");
  assert.ok(y < node.y && node.y + node.h < y + h);
  assert.equal(boxAround(layout, node).module.path, "h.0.mlp");
  assert.equal(program.root.children[0].path, "h.0", "a list that is only there to hold layers is no box");
});

test("an op stands between the modules that ran around it, whatever was recomputed early or unpacked late", () => {
  const text = "a1 = exp() @a\n m = sin(a1)\n b1 = cos(m) @b\n ---\n va = view(a1) @a\n gb = mul(b1) @b\n gm = mul(gb, va)\n ga = mul(gm) @a\n n = getitem(gm) @b";
  const { nodes } = laidOut(text, { depth: 1 }).layout;
  const order = [...nodes.values()].sort((one, other) => one.y - other.y).map(({ id }) => id);
  assert.deepEqual(order.filter((id) => ["a|backward", "gm", "b|backward"].includes(id)), ["a|backward", "gm", "b|backward"]);
  assert.deepEqual(["a", "b"].map((path) => nodes.get(`${path}|forward`).y), ["a", "b"].map((path) => nodes.get(`${path}|backward`).y));
});

test("a node moves from where it was, as the camera follows, to where it is", () => {
  const [{ layout: before }, { layout: after }] = [laidOut("a = exp()\n b = sin(a)\n c = cos(b)"), laidOut("a = exp()\n c = cos(a)\n d = abs(c)")];
  const move = (matches) => {
    globalThis.matchMedia = () => ({ matches });
    const motion = new Motion();
    motion.begin(before, after, { x: 0, y: 7 });
    return motion;
  };
  const motion = move(false);
  const c = after.nodes.get("c");
  assert.equal(motion.rectOf(c, 0).y, before.nodes.get("c").y + 7);
  assert.equal(motion.rectOf(c, 1).y, c.y);
  assert.deepEqual([[...motion.entering].map(({ id }) => id), motion.leaving.map(({ node }) => node.id)], [["d"], ["b"]]);
  assert.equal(move(true).moved(), 1, "nothing moves for those who asked for that");
});

test("removed ops come back as ghosts in their place", () => {
  const text = "a = exp()\n !b = sin(a)\n c = cos(a)";
  assert.equal(laidOut(text).layout.nodes.has("b"), false);
  const { layout } = laidOut(text, {}, { views: false, removed: true });
  assert.ok(layout.nodes.get("b").y > layout.nodes.get("a").y);
});

test("the same program is laid out the same, and one more op moves only what is below it", () => {
  const first = laidOut(LAYERS(3), { fold: false, depth: 9 }).layout;
  const again = laidOut(LAYERS(3), { fold: false, depth: 9 }).layout;
  for (const [id, { x, y }] of first.nodes) assert.deepEqual([again.nodes.get(id).x, again.nodes.get(id).y], [x, y]);
  const more = laidOut(LAYERS(3).replace("l = sum(m2)", "k = sin(m2)\n l = sum(k)"), { fold: false, depth: 9 }).layout;
  for (const id of ["n0", "m0", "n2", "gm1", "m2"]) assert.deepEqual([more.nodes.get(id).x, more.nodes.get(id).y], [first.nodes.get(id).x, first.nodes.get(id).y]);
});

test("no two nodes stand on each other, and all stand in their modules", () => {
  const wide = Array.from({ length: 11 }, (_, at) => `w${at} = mul(e)`).join("\n");
  const { layout } = laidOut(LAYERS(3).replace("---", `${wide}\n---`), { fold: false, depth: 9 });
  const nodes = [...layout.nodes.values()];
  for (const one of nodes) {
    assert.deepEqual(nodes.filter((other) => Math.abs(other.x - one.x) < one.w && Math.abs(other.y - one.y) < one.h), [one]);
    assert.ok(one.x >= layout.x && one.x + one.w <= layout.x + layout.w && one.y >= 0 && one.y + one.h <= layout.h);
  }
});

test("arrows follow the edges, and cross to the twin", () => {
  const { layout } = laidOut(CHAIN);
  const go = (from, key, twin = null) => step(layout.nodes.get(from), key, layout, twin && layout.nodes.get(twin))?.id;
  assert.deepEqual([go("a", "ArrowDown"), go("d", "ArrowUp"), go("gc", "ArrowDown"), go("d", "ArrowDown")], ["c", "c", "gd", undefined]);
  assert.deepEqual([go("a", "ArrowRight", "gd"), go("gc", "ArrowLeft"), go("a", "ArrowLeft")], ["gd", "c", undefined]);
});

test("what is under the pointer", () => {
  const { layout } = laidOut(LAYERS(2));
  const node = layout.nodes.get("h.1.norm|forward") ?? layout.nodes.get("h.0.norm|forward");
  assert.equal(nodeAt(layout, { x: node.x + node.w - 1, y: node.y + 1 }), node);
  assert.ok(isOnGlyph(node, { x: node.x + 5, y: node.y + 5 }) && !isOnGlyph(node, { x: node.x + 60, y: node.y + 5 }));
  const box = layout.boxes[0];
  assert.equal(glyphAt(layout, { x: box.x + 5, y: box.y + 5 }), box);
  assert.equal(nodeAt(layout, { x: box.x + 5, y: box.y + 5 }), null);
});

test("shares of time by what runs", () => {
  const { program } = laidOut(CHAIN);
  assert.deepEqual(shares(program.ops).map(({ key, us, count }) => [key, us, count]), [["aten.mul.default", 4, 2], ["aten.exp.default", 2, 1], ["aten.sin.default", 2, 1], ["aten.cos.default", 2, 1]]);
});

test("5,300 nodes, all open, take less than half a second", () => {
  const rows = (make) => Array.from({ length: 2650 }, (_, at) => make(at, `h.${Math.floor(at / 55)}.${"abcde"[Math.floor((at % 55) / 11)]}`));
  const forward = rows((at, module) => `f${at} = sin(${at ? `f${at - 1}` : ""}) @${module}`);
  const backward = rows((at, module) => `g${at} = cos(f${at}${at < 2649 ? `, g${at + 1}` : ""}) @${module}`);
  const one = payload([...forward, "---", ...backward.reverse()].join("\n"));
  // CPU time: whatever else the machine does is not the layout's.
  const started = process.cpuUsage();
  const program = buildProgram(one, SHOWN);
  const layout = layOut(program, folding({ fold: false, depth: 9 }));
  const { user, system } = process.cpuUsage(started);
  const ms = (user + system) / 1000;
  assert.equal(layout.nodes.size, 5300);
  console.log(`${layout.nodes.size} nodes: ${ms.toFixed(0)} ms of CPU`);
  assert.ok(ms < 500, `${ms} ms`);
});

test("an update is one box beside the backward, which opens to what flows down in it", () => {
  const text = `
    x = placeholder()
    a = mm(x) @m
    ---
    da = mm(a) @m
    ---
    norm = norm(da)
    step = mul(da, norm)`;
  const closed = laidOut(text);
  const update = closed.layout.nodes.get("the update|update");
  assert.deepEqual(lines(update), ["the update", "of the parameters", "4.00 µs · 2 ops"]);
  assert.equal(nodeOfValue("step", closed.program, closed.layout), update);
  assert.ok([...closed.layout.nodes.values()].every((one) => one === update || one.x + one.w < update.x));
  assert.ok(update.x + update.w <= closed.layout.x + closed.layout.w);
  const { layout } = laidOut(text, { opened: new Set(["the update"]) });
  const [a, da, norm, step] = ["a", "da", "norm", "step"].map((name) => layout.nodes.get(name));
  assert.ok(a.x + a.w < da.x && da.x + da.w < norm.x && norm.y < step.y);
  const around = boxAround(layout, norm);
  assert.equal(around, boxAround(layout, step));
  assert.equal(around.module.path, "the update");
  assert.ok(layout.boxes.every((box) => box === around || box.x + box.w <= around.x));
  assert.ok(norm.x + norm.w <= layout.x + layout.w && step.y + step.h <= layout.h);
  assert.ok(Number.isNaN(laidOut(CHAIN).layout.axes.update));
});
