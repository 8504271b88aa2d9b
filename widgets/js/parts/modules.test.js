import assert from "node:assert/strict";
import test from "node:test";

import { program } from "../testing/program.js";
import { buildTree, changes, ranks, runs, slowestIn, spread } from "./modules.js";

const tree = buildTree(program());
const names = (branches) => branches.map((one) => one.name || one.type);
const at = (path) => tree.modules.find((one) => one.path === path);

test("modules and lines outside of any stand at the top, in the order of the program", () => {
  assert.deepEqual(names(tree.top), ["GPT", "gpt.py:9  loss = mse(y, t)", "inputs"]);
  assert.deepEqual(names(tree.top[0].children), ["gpt.py:7  x = x * 2", "h"]);
});

test("own ops of a module with modules inside are in lines among those", () => {
  assert.deepEqual(names(at("h.1").children), ["up", "gpt.py:5  return gelu(y)"]);
  assert.deepEqual(at("h.1").children[1].values, ["gelu_1", "dgelu_1"]);
  assert.deepEqual(at("h.1").values, []);
});

test("sums count ops that do work, before and after; what was removed saves nothing", () => {
  assert.deepEqual(at("h.1.up").own, { ops: [3, 4], forward: [2, 2.5], backward: [8, 8], update: [0, 0], saved: 24 });
  assert.deepEqual(at("h.1").sums, { ops: [5, 6], forward: [3, 3.5], backward: [9, 9], update: [0, 0], saved: 24 });
  assert.deepEqual(tree.total.ops, [18, 18]);
  assert.deepEqual(tree.total.forward, [11, 10.5]);
});

test("parameters are in their module, other inputs outside", () => {
  assert.equal(tree.home.get("weight").path, "h.0.up");
  assert.equal(tree.home.get("x").name, "inputs");
});

test("an op that a pass added stands where the pass put it", () => {
  const rank = ranks(program());
  assert.ok(rank.get("mm_1") < rank.get("added") && rank.get("added") < rank.get("view_1"));
});

test("numbered siblings with the same captured structure fold, whatever the passes did to one of them", () => {
  const found = runs(at("h").children, true).map(names);
  assert.deepEqual(found, [["0", "1", "2"]]);
  assert.equal(runs(at("h").children, false).length, 3);
});

test("a layer with another shape inside stands apart", () => {
  const other = program();
  other.values.gelu_2.type = "f32[4, 4]";
  const top = buildTree(other);
  assert.deepEqual(runs(top.modules.find((one) => one.path === "h").children, true).map(names), [["0", "1"], ["2"]]);
});

test("siblings with names of their own never fold", () => {
  const other = program();
  for (const one of Object.values(other.values)) one.module = one.module.replace(/^h\.(\d)/, "h.proj_$1");
  assert.equal(runs(buildTree(other).modules.find((one) => one.path === "h").children, true).length, 3);
});

test("what is told to be slow is found: modules by their paths, a line by its text where no path tells of one", () => {
  const of = (fields) => slowestIn(tree, { said: "", line: "", ...fields }).map(({ path, name }) => path || name);
  assert.deepEqual(of({ name: "h.*.up", paths: ["h.0.up", "h.1.up", "h.2.up"] }), ["h.0.up", "h.1.up", "h.2.up"]);
  assert.deepEqual(of({ name: "GPT", paths: [""] }), [""]);
  assert.deepEqual(of({ name: "gpt.py:9  loss = mse(y, t)", paths: [] }), ["gpt.py:9  loss = mse(y, t)"]);
  assert.deepEqual(of({ name: "gpt.py:7  x = x * 2", paths: [] }), ["gpt.py:7  x = x * 2"]);
  assert.deepEqual(slowestIn(tree, null), []);
});

test("the spread of layers names the slowest", () => {
  const { median, slowest } = spread(at("h").children);
  assert.equal(slowest.path, "h.1");
  assert.equal(median, 8);
});

test("a rewritten value is changed, not removed", () => {
  assert.deepEqual([...changes(program())], [["added", "+"], ["mm_0", "~"], ["scale", "-"]]);
});

test("a trace without modules is a list of lines", () => {
  const other = program();
  for (const one of Object.values(other.values)) [one.module, one.module_type] = ["", ""];
  assert.deepEqual(names(buildTree(other).top), ["gpt.py:7  x = x * 2", "gpt.py:4  y = self.up(x)", "gpt.py:5  return gelu(y)", "gpt.py:9  loss = mse(y, t)", "inputs"]);
});

test("an empty trace has no rows", () => {
  const empty = { ...program(), values: {}, memory: { before: { ops: [] }, after: { ops: [] } } };
  assert.deepEqual(buildTree(empty).top, []);
});
