import assert from "node:assert/strict";
import test from "node:test";

import { answer, folded, isIn, layersOf, sorted } from "../layerrows.js";
import { buildTree } from "../modules.js";
import { program } from "../testing/program.js";

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
  assert.deepEqual([row("outside modules").backward, row("outside modules").modules], [[1, 1], []]);
});

test("each value with a time is in one row, those outside of any module too", () => {
  const rowsOf = (name) => rows.filter((one) => isIn(one, tree.home.get(name))).map((one) => one.path);
  assert.deepEqual(["loss", "scale", "mm_1", "gelu_1"].map(rowsOf), [["outside modules"], ["GPT"], ["h.1.up"], ["h.1"]]);
});

test("a list of modules that does nothing itself is no row", () => {
  assert.equal(row("h"), undefined);
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
