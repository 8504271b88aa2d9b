import assert from "node:assert/strict";
import test from "node:test";

import { buildTree } from "../parts/modules.js";
import { program } from "../testing/program.js";
import { Rows } from "./rows.js";

const state = (changes = {}) => ({ options: { fold: true, removed: false, views: false }, toggled: new Map(), apart: new Set(), shown: new Map(), selected: "", ...changes });

function rows(changes, payload = program()) {
  const list = new Rows(buildTree(payload), payload.values, state(changes));
  return list.list().map((row) => "  ".repeat(row.level - 1) + { group: () => row.group.name, pair: () => `${row.left}|${row.right}`, note: () => "(note)", unused: () => `(${row.op.op})` }[row.kind]());
}

const FOLD = "//h/h.*0";
const open = (...keys) => new Map(keys.map((key) => [key, true]));

test("at first the way to the folded layers is open, and one level of them", () => {
  assert.deepEqual(rows({}), ["GPT", "  gpt.py:7  x = x * 2", "  h.0 … h.2", "    (note)", "    up", "    gpt.py:5  return gelu(y)", "gpt.py:9  loss = mse(y, t)"]);
});

test("an op stands beside its backward twins; what has no twin there comes last", () => {
  const shown = rows({ toggled: open(`${FOLD}/up`, "/gpt.py:9  loss = mse(y, t)") });
  assert.deepEqual(shown.slice(4, 8), ["    up", "      (note)", "      mm_0|dx_0", "      |dw_0"]);
  assert.equal(shown.at(-1), "  loss|dloss");
});

test("a folded row sums its layers; inside are the ops of the first, or of the selected one", () => {
  const payload = program();
  const list = new Rows(buildTree(payload), payload.values, state({ selected: "dx_1", toggled: open(`${FOLD}/up`) }));
  const row = list.list().find((one) => one.kind === "group" && one.group.name === "up");
  assert.equal(row.group.sums.backward[1], 16);
  assert.equal(row.group.shown.path, "h.1.up");
});

test("a module with a name of its own stands beside the model that has none", () => {
  const payload = program();
  for (const name of ["loss", "dloss"]) Object.assign(payload.values[name], { module: "losses.pixel", module_type: "MSELoss" });
  assert.deepEqual(buildTree({ ...payload, roots: ["losses.pixel"] }).top.map(({ name, children }) => [name || "model", children.map((one) => one.name)]).slice(0, 2), [
    ["model", ["gpt.py:7  x = x * 2", "h"]],
    ["losses", ["pixel"]],
  ]);
});

test("apart, each layer has a row", () => {
  assert.deepEqual(rows({ apart: new Set([FOLD]) }).slice(2, 7), ["  h.0 … h.2", "    (note)", "    h.0", "    h.1", "    h.2"]);
});

test("without folding each layer stands in its list", () => {
  assert.deepEqual(rows({ options: { fold: false, removed: false, views: false }, toggled: open("/", "//h") }).filter((row) => /^ {4}\d/.test(row)), ["    0", "    1", "    2"]);
});

test("removed values and views are listed on demand, and a selected one always", () => {
  const line = open("//gpt.py:7  x = x * 2", `${FOLD}/up`);
  assert.ok(!rows({ toggled: line }).some((row) => /scale|view/.test(row)));
  assert.ok(rows({ toggled: line, options: { fold: true, removed: true, views: false } }).includes("    scale|"));
  assert.ok(rows({ toggled: line, options: { fold: true, removed: false, views: true } }).includes("      view_0|"));
  assert.ok(rows({ toggled: line, selected: "view_2" }).includes("      view_2|"));
});

test("the way to a module lists the keys to unfold", () => {
  const payload = program();
  const tree = buildTree(payload);
  const list = new Rows(tree, payload.values, state());
  assert.deepEqual(list.wayTo(tree.home.get("dx_2")), ["/", FOLD, `${FOLD}/up`]);
});

test("a twin that is one result of an op is found by that op", () => {
  const payload = program();
  Object.assign(payload.values.dx_0, { op: "getitem", reads: ["dw_0"], time_us: [3, null] });
  assert.ok(rows({ toggled: open(`${FOLD}/up`) }, payload).includes("      mm_0|dw_0"));
});

test("every value is in exactly one row once all is open and listed", () => {
  const payload = program();
  const options = { fold: false, removed: true, views: true };
  const toggled = new Map();
  toggled.get = () => true;
  const list = new Rows(buildTree(payload), payload.values, state({ options, toggled })).list();
  const listed = list.flatMap((row) => (row.kind === "pair" ? [row.left, row.right] : [])).filter(Boolean);
  const ops = Object.keys(payload.values).filter((name) => payload.values[name].op !== "placeholder");
  assert.deepEqual(listed.sort(), ops.sort());
});

test("what is never used has a row in its module's or line's place, whatever is searched for", () => {
  const unused = (fields) => ({ op: "aten.exp.default", module: "", module_type: "GPT", source: "gpt.py:8  probe = x.exp()", phase: "forward", nbytes: 24, time_us: 2, ...fields });
  const ops = [unused({}), unused({ module: "h.0.up", module_type: "Linear" }), unused({ module: "spare", module_type: "Spare" })];
  const payload = { ...program(), unused: { provenance: "modelled", ops } };
  const shown = rows({ toggled: open("//gpt.py:8  probe = x.exp()", "//spare", "//h", "//h/0", "//h/0/up"), options: { fold: false, removed: false, views: false } }, payload);
  assert.ok(shown.join("\n").includes("  gpt.py:8  probe = x.exp()\n    (aten.exp.default)"));
  assert.ok(shown.join("\n").includes("  spare\n    (aten.exp.default)"));
  assert.deepEqual(shown.filter((row) => /dw_0|^ {8}\(/.test(row)), ["        |dw_0", "        (aten.exp.default)"]);
  assert.equal(buildTree(payload).total.forward[1], buildTree(program()).total.forward[1]);
});

test("a line of which nothing is used stands before the next one", () => {
  const op = { op: "aten.exp.default", module: "", module_type: "GPT", source: "gpt.py:6  probe = x.exp()", phase: "forward", nbytes: 24, time_us: 2 };
  const shown = rows({}, { ...program(), unused: { provenance: "modelled", ops: [op] } });
  assert.deepEqual(shown.slice(0, 3), ["GPT", "  gpt.py:6  probe = x.exp()", "  gpt.py:7  x = x * 2"]);
});

test("an update's ops have a row each, and their times a column", () => {
  const payload = program();
  payload.values.adamw = { ...payload.values.loss, op: "aten._fused_adamw.default", phase: "update", source: "gpt.py:11  opt.step()", twins: [], time_us: [4, 3] };
  payload.memory.before.ops.push("adamw");
  payload.memory.after.ops.push("adamw");
  const tree = buildTree(payload);
  assert.deepEqual(tree.total.update, [4, 3]);
  assert.deepEqual(rows({ toggled: open("/gpt.py:11  opt.step()") }, payload).slice(-2), ["gpt.py:11  opt.step()", "  adamw|"]);
});
