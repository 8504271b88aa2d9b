import assert from "node:assert/strict";
import test from "node:test";

import { value } from "../testing/program.js";
import { found, parse, rank } from "./query.js";

const values = {
  mm: value({ op: "aten.mm.default", module: "h.1.up", module_type: "Linear", source: "gpt.py:4  y = self.up(x)", saved_bytes: 24, time_us: [900, 1500], type: "bf16[2, 3]", nbytes: 3 * 2 ** 20 }),
  addmm: value({ op: "aten.addmm.default", module: "h.10.up", module_type: "Linear", source: "gpt.py:8  z", time_us: [2, 2] }),
  fused: value({ op: "fused_mul_add_1ab", kernel: "fused_mul_add_1ab", phase: "backward", type: "(f32[2], i64[2])", time_us: [null, 5] }),
  gone: value({ op: "aten.native_layer_norm.default", removed: true, time_us: [8, null] }),
  view: value({ op: "aten.view.default", module: "h.1", time_us: [null, null], nbytes: 0 }),
};
const search = (text) => [...(found(parse(text, values), values) ?? ["everything"])].join(" ");
const hints = (text) => parse(text, values).hints;

test("nothing typed searches for nothing", () => {
  assert.equal(found(parse("  ", values), values), null);
});

test("words are looked for everywhere, and all must be there", () => {
  assert.equal(search("self.up"), "mm");
  assert.equal(search("LINEAR h.1.up"), "mm");
  assert.equal(search('"y = self"'), "mm");
  assert.equal(search("fused nothing"), "");
});

test("what is called so comes before what has it as a part, and that before what contains it", () => {
  const all = { ...values, up: value({ op: "aten.upsample.vec" }), proj_up: value({}), dropout_up2: value({ source: "gpt.py:9  up = x" }) };
  const ranks = (text) => Object.fromEntries(Object.keys(all).map((name) => [name, rank(parse(text, all), name, all[name])]));
  const of = ranks("up");
  assert.deepEqual([of.up, of.mm, of.proj_up, of.dropout_up2], [0, 0, 1, 2]);
  assert.deepEqual([ranks("mm").mm, ranks("mm").addmm, ranks("mm linear").addmm], [0, 2, 2]);
  assert.equal(ranks("op:mm").mm, 0);
});

test("filters compare whole parts of a name", () => {
  assert.equal(search("op:mm"), "mm");
  assert.equal(search("op:layer_norm"), "gone");
  assert.equal(search("op:*mm"), "mm addmm");
  assert.equal(search("module:h.1"), "mm view");
  assert.equal(search("module:h.*.up"), "mm addmm");
  assert.equal(search("module:linear"), "mm addmm");
});

test("dtypes are those of any result", () => {
  assert.equal(search("dtype:bf16"), "mm");
  assert.equal(search("dtype:i64"), "fused");
});

test("phase, kernel, saved, removed", () => {
  assert.equal(search("phase:backward"), "fused");
  assert.equal(search("phase:b"), "fused");
  assert.equal(search("kernel:"), "fused");
  assert.equal(search("kernel:mul_add"), "fused");
  assert.equal(search("saved"), "mm");
  assert.equal(search("removed"), "gone");
});

test("times and bytes by their unit; what takes no time is neither above nor below", () => {
  assert.equal(search(">1ms"), "mm");
  assert.equal(search("<10us"), "addmm fused gone");
  assert.equal(search(">2MiB"), "mm");
  assert.equal(search("<1B"), "view");
});

test("a minus negates any term", () => {
  assert.equal(search("-op:mm -removed <10us"), "addmm fused");
  assert.equal(search('-"y = self" saved'), "");
});

test("a filter that is being typed takes nothing away", () => {
  assert.equal(search("op:"), Object.keys(values).join(" "));
});

test("what cannot be found says why, and nothing is thrown", () => {
  assert.match(hints("dtype:foo")[0], /“foo”.*bf16, f32, i64/);
  assert.match(hints("phase:down")[0], /forward, backward or update/);
  assert.match(hints(">5")[0], /needs a unit/);
  assert.match(hints("dytpe:f32")[0], /No filter “dytpe:”/);
  assert.deepEqual(hints("op:mm dtype:f32 4: >1ms"), []);
  for (const text of ["-", '"', "op:(", "module:[*", "<", "a\\b", "__proto__", "constructor:x"]) assert.doesNotThrow(() => search(text));
});
