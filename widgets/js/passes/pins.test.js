import assert from "node:assert/strict";
import test from "node:test";

import { frozen, frozenBy, hasGradient, isMatch, parameterOf, pinned, pinOf } from "./pins.js";

test("globs are Python's", () => {
  for (const [glob, name] of [["h.*.mlp.*", "h.11.mlp.up.weight"], ["h.?", "h.1"], ["h.[0-2].w", "h.1.w"], ["h.[!0].w", "h.1.w"], ["a(b)", "a(b)"]]) assert.ok(isMatch(glob, name), glob);
  for (const [glob, name] of [["h.?", "h.11"], ["h.1", "hx1"], ["h.[!0].w", "h.0.w"], ["h", "h.1"]]) assert.ok(!isMatch(glob, name), glob);
});

test("the last pattern that matches decides", () => {
  assert.equal(frozenBy(["*", "!*.lora_*"], "h.0.lora_a"), "");
  assert.equal(frozenBy(["*", "!*.lora_*"], "h.0.weight"), "*");
  assert.equal(frozenBy(["!h.0", "h.*"], "h.0"), "h.*");
  assert.equal(frozenBy(null, "h.0"), "");
});

test("freezing adds the exact name, training takes it away again", () => {
  assert.deepEqual(frozen(["a"], "h.0.w", true), ["a", "h.0.w"]);
  assert.deepEqual(frozen(["a", "h.0.w"], "h.0.w", false), ["a"]);
  assert.deepEqual(frozen(null, "h.0.w", true), ["h.0.w"]);
});

test("what a glob freezes is trained by an exception, and frozen again without it", () => {
  assert.deepEqual(frozen(["h.*"], "h.0.w", false), ["h.*", "!h.0.w"]);
  assert.deepEqual(frozen(["h.*", "!h.0.w"], "h.0.w", true), ["h.*"]);
});

test("whatever was there, freezing freezes and training trains", () => {
  const lists = [[], ["h.*"], ["h.*", "!h.0.w"], ["!h.0.w"], ["h.0.w", "!h.*"], ["*", "!*.w", "h.?.w"]];
  for (const list of lists) {
    assert.notEqual(frozenBy(frozen(list, "h.0.w", true), "h.0.w"), "");
    assert.equal(frozenBy(frozen(list, "h.0.w", false), "h.0.w"), "");
  }
});

test("a gradient and its input are of the same parameter", () => {
  const value = (op, of) => ({ op, of });
  const values = { h_w: value("placeholder", "h.w"), grad_h_w: value("aten.t.default", "h_w"), x: value("placeholder", ""), grad_x: value("aten.mm.default", "x"), y: value("placeholder", "y.w"), z: value("aten.mul.Tensor", "") };
  assert.deepEqual(["h_w", "grad_h_w", "grad_x", "x", "z", "missing"].map((name) => parameterOf(name, values)), ["h.w", "h.w", "x", "", "", ""]);
  assert.deepEqual(["h.w", "x", "y.w"].map((name) => hasGradient(name, values)), [true, true, false]);
});

test("a pin stands in one list at a time and leaves the others alone", () => {
  const config = { save: ["a", "h.*"], recompute: ["b"] };
  assert.deepEqual(["a", "b", "c"].map((name) => pinOf(config, name)), ["save", "recompute", "auto"]);
  assert.deepEqual(pinned(config, "a", "recompute"), { save: ["h.*"], recompute: ["b", "a"] });
  assert.deepEqual(pinned(config, "b", "auto"), { save: ["a", "h.*"], recompute: [] });
  assert.deepEqual(pinned(config, "c", "save"), { save: ["a", "h.*", "c"], recompute: ["b"] });
});
