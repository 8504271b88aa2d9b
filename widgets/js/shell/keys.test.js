import assert from "node:assert/strict";
import test from "node:test";

import { shortcut, Trail } from "./keys.js";

const DIV = { tagName: "DIV" };
const press = (key, more = {}) => shortcut({ key, ctrlKey: false, metaKey: false, altKey: false, target: DIV, ...more });

test("keys ask for actions, digits for tabs", () => {
  assert.deepEqual(["/", "?", "p", "[", "]", "3"].map((key) => press(key)), ["search", "help", "passes", "back", "forward", 3]);
  assert.deepEqual(["a", "0", "Enter", "toString"].map((key) => press(key)), [null, null, null, null]);
});

test("what is typed into a field is never taken", () => {
  const fields = [{ tagName: "INPUT", type: "text" }, { tagName: "INPUT", type: "search" }, { tagName: "INPUT", type: "number" }, { tagName: "TEXTAREA" }, { tagName: "SELECT" }, { tagName: "DIV", isContentEditable: true }];
  for (const target of fields) assert.equal(press("/", { target }), null);
  assert.equal(press("/", { target: { tagName: "INPUT", type: "checkbox" } }), "search");
});

test("chords belong to the browser, but AltGr writes brackets", () => {
  assert.equal(press("p", { ctrlKey: true }), null);
  assert.equal(press("p", { metaKey: true }), null);
  assert.equal(press("[", { ctrlKey: true, altKey: true }), "back");
});

test("a trail goes back and forward; a new selection forgets what lay ahead", () => {
  const trail = new Trail();
  for (const name of ["a", "b", "b", "", "c"]) trail.visit(name);
  assert.deepEqual([trail.step(-1), trail.step(-1), trail.step(-1)], ["b", "a", null]);
  assert.equal(trail.step(1), "b");
  trail.visit("d");
  assert.equal(trail.step(1), null);
  assert.equal(trail.step(-1), "b");
});

test("a step's own selection does not lengthen the trail", () => {
  const trail = new Trail();
  for (const name of ["a", "b"]) trail.visit(name);
  trail.visit(trail.step(-1));
  assert.equal(trail.step(1), "b");
});
