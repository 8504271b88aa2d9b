// Two texts side by side: as long as each other, each the whole of its own, and what became what in one row.

import assert from "node:assert/strict";
import { test } from "node:test";

import { sides } from "./sides.js";

/** @param {string} value @param {Line["diff"]} [diff] @param {string} [code] @param {Line["kind"]} [kind] @returns {Line} */
const line = (value, diff = " ", code = `${value} = f()`, kind = "op") => ({ code, comment: "", value, kind, diff });
/** @param {string} comment @param {Line["kind"]} [kind] @returns {Line} */
const header = (comment, kind = "group") => ({ code: "", comment, value: "", kind, diff: " " });
const blank = header("", "blank");
/** @param {Line[]} lines */
const text = (lines) => lines.map((one) => (one.filler ? "" : one.code || one.comment || one.kind));
/** @param {Line[]} before @param {Line[]} lines */
const laid = (before, lines) => sides({ before, lines, ops: [0, 0], added: 0, removed: 0 });

test("what did not change stands on both sides, what came or went beside nothing", () => {
  const { before, after } = laid([line("a"), line("b", "-"), line("c")], [line("a"), line("b", "-"), line("c"), line("d", "+")]);
  assert.deepEqual(text(before), ["a = f()", "b = f()", "c = f()", ""]);
  assert.deepEqual(text(after), ["a = f()", "", "c = f()", "d = f()"]);
});

test("a line that was rewritten stands beside itself, with the part that differs", () => {
  const old = line("a", "-", "a = mul(b, c)");
  const { before, after } = laid([line("x", "-"), old], [line("x", "-"), old, line("a", "~", "a = mul(bb, c)"), line("y", "+")]);
  assert.deepEqual(text(before), ["x = f()", "a = mul(b, c)", ""]);
  assert.deepEqual(text(after), ["", "a = mul(bb, c)", "y = f()"]);
  assert.deepEqual([before[1], after[1]].map(({ code, differs }) => code.slice(...(differs ?? []))), ["b", "bb"]);
});

test("lines that gave way to others share their rows", () => {
  const { before, after } = laid([line("a", "-"), line("b", "-"), line("c")], [line("a", "-"), line("b", "-"), line("k", "+"), line("c")]);
  assert.deepEqual([text(before), text(after)], [["a = f()", "b = f()", "c = f()"], ["k = f()", "", "c = f()"]]);
});

test("a line keeps its place before, wherever a list of changes puts it", () => {
  const { before, after } = laid([line("y", "-"), line("v")], [line("v"), line("y", "-")]);
  assert.deepEqual([text(before), text(after)], [["y = f()", "v = f()"], ["", "v = f()"]]);
});

test("a line that moved is gone where it was and new where it is", () => {
  const { before, after } = laid([line("m", "-"), line("v")], [line("m", "-"), line("v"), line("m", "+")]);
  assert.deepEqual([text(before), text(after)], [["m = f()", "v = f()", ""], ["", "v = f()", "m = f()"]]);
});

test("a header that both have stands beside itself, one of a new group beside nothing", () => {
  const old = [blank, header("# one"), line("a"), blank, header("# two"), line("c")];
  const now = [blank, header("# one"), line("a"), blank, header("# new"), line("k", "+"), blank, header("# two"), line("c")];
  const { before, after } = laid(old, now);
  assert.deepEqual(text(before), ["blank", "# one", "a = f()", "blank", "", "", "# two", "c = f()"]);
  assert.deepEqual(text(after), ["blank", "# one", "a = f()", "blank", "# new", "k = f()", "# two", "c = f()"]);
});

test("rows of inputs and rows of ops are not mixed, and both sides change in the same rows", () => {
  const weight = line("w", "-", "", "input");
  const { before, after } = laid([weight, line("m", "-"), line("c")], [weight, line("k", "+"), line("m", "-"), line("c")]);
  assert.deepEqual(before.map(({ kind }) => kind), ["input", "op", "op"]);
  assert.deepEqual(before.map(({ kind }) => kind), after.map(({ kind }) => kind));
  assert.deepEqual(before.map(({ diff }) => diff === " "), after.map(({ diff }) => diff === " "));
});

test("the signature and what is freed are left out", () => {
  const lines = [line("", " ", "def f():", "signature"), line("", " ", "del a", "free"), line("a")];
  const { before, after } = laid(lines, lines);
  assert.deepEqual([text(before), text(after)], [["a = f()"], ["a = f()"]]);
});
