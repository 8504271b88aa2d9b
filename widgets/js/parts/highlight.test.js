import assert from "node:assert/strict";
import test from "node:test";

import { tokens } from "./highlight.js";

const kinds = (code) => tokens(code).filter(({ kind }) => kind).map(({ kind, text }) => `${kind} ${text}`);

test("nothing of the text is lost", () => {
  const code = '@triton.jit\ndef f(x):  # "why"\n    y = tl.load(x + 1e-05) * 0x10  \n    return """a\n"b" """, torch.ops.aten.mm.default(y, \'it\\\'s\')';
  assert.equal(tokens(code).map(({ text }) => text).join(""), code);
});

test("each kind is told apart", () => {
  assert.deepEqual(kinds("@triton.jit"), ["decorator @triton.jit"]);
  assert.deepEqual(kinds("return x_1"), ["keyword return", "name x_1"]);
  assert.deepEqual(kinds("torch.ops.aten.mm.default(a)"), ["op torch.ops.aten.mm.default", "name a"]);
  assert.deepEqual(kinds("1e-05 2.5 64"), ["number 1e-05", "number 2.5", "number 64"]);
});

test("a quote in a comment opens no string, a # in a string no comment", () => {
  assert.deepEqual(kinds("# it's\nx"), ["comment # it's", "name x"]);
  assert.deepEqual(kinds('"# no" y'), ['string "# no"', "name y"]);
});

test("a string that is never closed ends with its line", () => {
  assert.equal(tokens('"open\nx').map(({ text }) => text).join(""), '"open\nx');
  assert.deepEqual(kinds('"open\nx').at(-1), "name x");
});
