import assert from "node:assert/strict";
import test from "node:test";

import { History, inverse } from "./history.js";

const payload = { config: { fuse: true, remat: 0.5, freeze: [] }, baseline: { is_pinned: false, config: {} }, clock: { chosen: "H200" } };
const configure = (changes) => ({ type: "configure", changes });

test("a choice is taken back by what was there before it", () => {
  assert.deepEqual(inverse(configure({ fuse: false, remat: 0.5 }), payload), configure({ fuse: true }));
  assert.deepEqual(inverse({ type: "clock", device: "here" }, payload), { type: "clock", device: "H200" });
  assert.deepEqual(inverse({ type: "pin" }, payload), { type: "unpin" });
  const pinned = { ...payload, baseline: { is_pinned: true, config: { fuse: false } } };
  assert.deepEqual(inverse({ type: "unpin" }, pinned), { type: "pin", config: { fuse: false } });
});

test("what changes nothing, and what is no choice, is not undone", () => {
  for (const message of [configure({ freeze: [] }), { type: "clock", device: "H200" }, { type: "measure" }]) assert.equal(inverse(message, payload), null);
});

test("what is refused is not undone, and what was undone before it can be made again", () => {
  const history = new History();
  history.note(configure({ fuse: false }), payload);
  history.accept();
  history.undo();
  history.accept();
  history.note(configure({ remat: 0 }), payload);
  assert.deepEqual([history.canUndo, history.canRedo], [true, false]);
  assert.deepEqual([history.refuse(), history.canUndo, history.canRedo], [true, false, true]);
  assert.equal(history.refuse(), false);
  assert.deepEqual(history.redo(), configure({ fuse: false }));
  history.refuse();
  assert.deepEqual([history.canUndo, history.canRedo], [false, true]);
});

test("undo goes back, redo forward, and a new choice forgets what was undone", () => {
  const history = new History();
  assert.deepEqual([history.canUndo, history.undo(), history.redo()], [false, null, null]);
  history.note(configure({ fuse: false }), payload);
  history.note({ type: "pin" }, { ...payload, config: { ...payload.config, fuse: false } });
  assert.deepEqual(history.undo(), { type: "unpin" });
  assert.deepEqual(history.undo(), configure({ fuse: true }));
  assert.equal(history.canUndo, false);
  assert.deepEqual([history.redo(), history.canRedo], [configure({ fuse: false }), true]);
  assert.deepEqual(history.redo(), { type: "pin", config: { fuse: false, remat: 0.5, freeze: [] } });
  history.undo();
  history.note(configure({ remat: 0 }), payload);
  assert.deepEqual([history.canRedo, history.undo()], [false, configure({ remat: 0.5 })]);
});
