import assert from "node:assert/strict";
import test from "node:test";

import { percent } from "./facts.js";
import { computedBy, sorted } from "./rows.js";

const kernel = (name, calls, bytes, us) => ({ name, calls, nbytes_read: bytes, nbytes_written: 0, time_us: us });
const all = [kernel("b", 1, 100, null), kernel("a", 12, 10, 2), kernel("c", 3, 30, 5), kernel("d", 3, 1, null)];
const names = (key, ascending) => sorted(all, key, ascending).map(({ name }) => name).join("");

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
  assert.equal(all.map(({ name }) => name).join(""), "bacd");
});

test("a kernel leads to its calls, not to what was removed or is a part", () => {
  const values = { x: { kernel: "k", removed: false, op: "k" }, y: { kernel: "k", removed: true, op: "k" }, z: { kernel: "k", removed: false, op: "getitem" }, w: { kernel: "", removed: false, op: "aten.mm" }, v: { kernel: "k", removed: false, op: "k" } };
  assert.deepEqual([...computedBy(values)], [["k", ["x", "v"]]]);
});

test("more than the peak that was measured is at peak", () => {
  assert.deepEqual([0.974, 1.004, 1.02, 1.6].map(percent), ["97 %", "100 %", "at peak", "at peak"]);
});
