import assert from "node:assert/strict";
import test from "node:test";

import { percent } from "./facts.js";
import { computedBy, rowsOf, sorted } from "./rows.js";

const kernel = (name, calls, bytes, us, instead = null) => ({ name, said: name, calls, nbytes_read: bytes, nbytes_written: 0, time_us: us, kind: "measured", bound: "memory", peak_share: null, replaces: instead && { us: instead } });
const all = rowsOf({ kernels: [kernel("b", 1, 100, null), kernel("a", 12, 10, 2, 48), kernel("c", 3, 30, 5, 10), kernel("d", 3, 1, null)], aten: [] });
const names = (key, ascending) => sorted(all, key, ascending).map(({ said }) => said).join("");

test("by the whole step: a small kernel with many launches may lead", () => {
  assert.equal(names("bytes", false), "abcd");
  assert.equal(names("time", false).slice(0, 2), "ac");
  assert.equal(names("calls", false), "acdb");
});

test("what has no time is last either way, in its order", () => {
  assert.equal(names("time", false), "acbd");
  assert.equal(names("time", true), "cabd");
});

test("names go by the alphabet, and the list given stays as it was", () => {
  assert.equal(names("name", true), "abcd");
  assert.equal(all.map(({ said }) => said).join(""), "bacd");
});

test("a kernel gains what the ops that it stands for take, over its own time", () => {
  assert.deepEqual(all.map(({ gain }) => gain), [null, 2, 10 / 15, null]);
  assert.equal(names("gain", true), "cabd");
});

test("operators of libraries are rows beside the kernels, and all sum to the step", () => {
  const aten = [{ name: "mm", said: "matmul ×4", calls: 4, nbytes: 8, time_us: 3, kind: "measured", bound: "compute", peak_share: 0.5, values: [] }];
  const rows = rowsOf({ kernels: [kernel("a", 12, 10, 2)], aten });
  assert.deepEqual(rows.map(({ said, step }) => [said, step]), [["a", 24], ["matmul ×4", 12]]);
  assert.equal(sorted(rows, "time", false)[0].said, "a");
});

test("a kernel leads to its calls, not to what was removed or is a part", () => {
  const values = { x: { kernel: "k", removed: false, op: "k" }, y: { kernel: "k", removed: true, op: "k" }, z: { kernel: "k", removed: false, op: "getitem" }, w: { kernel: "", removed: false, op: "aten.mm" }, v: { kernel: "k", removed: false, op: "k" } };
  assert.deepEqual([...computedBy(values)], [["k", ["x", "v"]]]);
});

test("more than the peak that was measured is at peak", () => {
  assert.deepEqual([0.974, 1.004, 1.02, 1.6].map(percent), ["97 %", "100 %", "at peak", "at peak"]);
});
