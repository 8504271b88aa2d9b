import assert from "node:assert/strict";
import test from "node:test";

import { buildTree } from "../parts/modules.js";
import { program } from "../testing/program.js";
import { answer, expected, folded, isIn, isOutOfLine, layersOf, outOfLine, parts, sorted } from "./rows.js";

const payload = program();
const tree = buildTree(payload);
const rows = layersOf(payload);
const row = (path) => rows.find((one) => one.path === path);

test("the rows add up to the step", () => {
  assert.deepEqual([row("h.1.up").forward, row("h.1.up").backward, row("h.1.up").saved], [[2, 2.5], [8, 8], 24]);
  assert.equal(rows.reduce((sum, one) => sum + one.backward[1], 0), tree.total.backward[1]);
  assert.equal(rows.reduce((sum, one) => sum + one.forward[0], 0), tree.total.forward[0]);
});

test("the outermost module has its own row, and what is outside of it another one", () => {
  assert.deepEqual([row("GPT").forward, row("GPT").modules], [[1, 0], [""]]);
  assert.deepEqual([row("(no module)").backward, row("(no module)").modules], [[1, 1], []]);
});

test("each value with a time is in one row, those outside of any module too", () => {
  const rowsOf = (name) => rows.filter((one) => isIn(one, tree.home.get(name))).map((one) => one.path);
  assert.deepEqual(["loss", "scale", "mm_1", "gelu_1"].map(rowsOf), [["(no module)"], ["GPT"], ["h.1.up"], ["h.1"]]);
});

test("a list of modules that does nothing itself is no row", () => {
  assert.equal(row("h"), undefined);
});

test("identical layers fold to their sum", () => {
  const up = folded(rows).find((one) => one.path === "h.*.up");
  assert.deepEqual([up.modules, up.backward, up.saved], [["h.0.up", "h.1.up", "h.2.up"], [16, 16], 72]);
});

test("sorting is by number, names by their digits, either way", () => {
  assert.equal(sorted(rows, "backward", true)[0].path, "h.1.up");
  assert.deepEqual(sorted([{ ...rows[1], path: "h.10" }, { ...rows[1], path: "h.9" }], "path", false).map((one) => one.path), ["h.9", "h.10"]);
});

test("one sentence says the answer", () => {
  assert.equal(answer(folded(rows)), "Backward is 1.9× forward; that of h.*.up ×3 takes 52 % of the step (matmul).");
  assert.equal(answer([]), "No op of this trace has a time.");
});

test("the kinds of folded layers are summed, and told in words", () => {
  const up = folded(rows).find((one) => one.path === "h.*.up");
  assert.deepEqual(up.kinds, [{ matmul: 13, reduction: 3 }, { matmul: 13, reduction: 3 }]);
  assert.deepEqual([parts(up.kinds[1]), parts(up.kinds[1], 1), parts({})], ["matmul 81 %, reduction 19 %", "matmul 81 %", ""]);
  assert.deepEqual([up.flops, expected(up)], [[[24, 48], [24, 48]], 2]);
});

test("a module is out of line where its ratio is well above that of its FLOPs", () => {
  const one = { ...row("h.1.up"), forward: [2, 2], backward: [4, 4] };
  assert.equal(isOutOfLine(one), false);
  assert.equal(isOutOfLine({ ...one, backward: [8, 8] }), true);
  assert.equal(isOutOfLine({ ...one, backward: [8, 8], flops: [[0, 0], [0, 0]] }), false);
  assert.equal(isOutOfLine({ ...one, backward: [4, 8] }), false, "the kernel of another module's ops may be booked on it");
  const odd = { ...one, backward: [8, 8] };
  const large = { ...one, path: "head", forward: [20, 20], backward: [40, 40] };
  assert.equal(outOfLine([large, odd]), odd);
  assert.equal(outOfLine([{ ...large, backward: [400, 400], flops: [[1, 20], [1, 20]] }, odd]), undefined, "too little to matter");
  assert.equal(answer([large, odd]), "Backward is 2.2× forward; that of head takes 57 % of the step (matmul). h.1.up is out of line as captured: 4.0× its forward, its matmuls 2×.");
  assert.match(answer([odd]), /That is out of line/);
});
