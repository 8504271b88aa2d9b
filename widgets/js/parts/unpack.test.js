// The fixture was packed by Python, as its test for the other half checks, and is unpacked here.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { decode, unpack } from "./unpack.js";

const { value, packed, encoded } = JSON.parse(readFileSync(new URL("../testing/packed.json", import.meta.url), "utf8"));

test("what Python packed is unpacked", () => {
  assert.deepEqual(unpack(packed), value);
});

test("so is its text", async () => {
  assert.deepEqual(await decode(encoded), value);
});

test("equal parts are one object", () => {
  const [one, other] = unpack(packed).values;
  assert.equal(one, other);
});

test("a key called __proto__ is a key", () => {
  const found = unpack({ atoms: [1], shapes: [["__proto__"]], nodes: [[0, 0]] });
  assert.deepEqual(Object.keys(found), ["__proto__"]);
});

test("what is made when it is asked for is the same, and made once", () => {
  for (const lazy of [1, 2, 3, 9]) assert.deepEqual(unpack(packed, lazy), value);
  const found = unpack(packed, 1);
  assert.equal(found.values, found.values);
  assert.deepEqual(Object.keys({ ...found }), Object.keys(value));
});

test("a key called __proto__ is a key there too", () => {
  const found = unpack({ atoms: [1], shapes: [["__proto__"]], nodes: [[0, 0]] }, 1);
  assert.deepEqual(Object.keys(found), ["__proto__"]);
  assert.equal(Object.getOwnPropertyDescriptor(found, "__proto__").get(), 1);
});
