import assert from "node:assert/strict";
import test from "node:test";

import { answer, folded, layersOf, sorted } from "../layerrows.js";
import { buildTree } from "../modules.js";
import { program } from "../testing/program.js";

const payload = program();
const tree = buildTree(payload);
const rows = layersOf(payload, tree);
const row = (path) => rows.find((one) => one.path === path);

test("without Python's rows they are summed from the values, and add up to the step", () => {
  assert.deepEqual([row("h.1.up").forward, row("h.1.up").backward, row("h.1.up").saved], [[2, 2.5], [8, 8], 24]);
  assert.deepEqual([row("h.1").backward, row("outside modules").backward], [[1, 1], [1, 1]]);
  assert.equal(rows.reduce((sum, one) => sum + one.backward[1], 0), tree.total.backward[1]);
  assert.equal(rows.reduce((sum, one) => sum + one.forward[0], 0), tree.total.forward[0]);
});

test("a list of modules that does nothing itself is no row", () => {
  assert.equal(row("h"), undefined);
});

test("the cause is what takes most of the own backward", () => {
  assert.equal(row("h.1.up").cause, "matmul 88 %");
  assert.equal(row("h.0").cause, "gelu_backward 100 %");
});

test("identical layers fold to their sum", () => {
  const up = folded(rows, tree).find((one) => one.path === "h.*.up");
  assert.deepEqual([up.modules, up.backward, up.saved], [["h.0.up", "h.1.up", "h.2.up"], [16, 16], 72]);
});

test("sorting is by number, names by their digits, either way", () => {
  assert.equal(sorted(rows, "backward", true)[0].path, "h.1.up");
  assert.deepEqual(sorted([{ ...rows[1], path: "h.10" }, { ...rows[1], path: "h.9" }], "path", false).map((one) => one.path), ["h.9", "h.10"]);
});

test("one sentence says the answer", () => {
  assert.equal(answer(folded(rows, tree)), "Backward is 1.9× forward; h.*.up ×3 takes 80 % of it (matmul).");
  assert.equal(answer([]), "No op of this trace has a time.");
});

test("Python's rows are taken as they are", () => {
  const given = { path: "head", module_type: "Linear", forward_ops: [1, 1], backward_ops: [2, 2], forward_us: [4, 4], backward_us: [9, 8], saved_bytes: [0, 16], cause: "cat 22 %" };
  const [head] = layersOf({ ...payload, layers: [given] }, tree);
  assert.deepEqual(head, { path: "head", type: "Linear", forward: [4, 4], backward: [9, 8], saved: 16, cause: "cat 22 %", modules: ["head"] });
});
