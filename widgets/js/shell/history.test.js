import assert from "node:assert/strict";
import test from "node:test";

import { History, inverse } from "./history.js";

const payload = { config: { fuse: true, remat: 0.5, freeze: [] }, baseline: { is_pinned: false, config: {} }, clock: { chosen: "H200" } };
const configure = (changes) => ({ type: "configure", changes });
const having = (changes) => ({ ...payload, config: { ...payload.config, ...changes } });

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
  history.accept(having({ fuse: false }));
  history.undo();
  history.accept(payload);
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

test("what was chosen is pending until a payload has it or the kernel is done with it", () => {
  const history = new History();
  history.note(configure({ fuse: false }), payload);
  history.note(configure({ remat: 0 }), having(history.pending));
  assert.deepEqual(history.pending, { fuse: false, remat: 0 });
  history.accept(payload); // such as that of a measurement, which answers neither
  assert.deepEqual(history.pending, { fuse: false, remat: 0 });
  history.accept(having({ fuse: false }));
  assert.deepEqual(history.pending, { remat: 0 });
  assert.equal(history.answer(configure({ fuse: true })), false);
  assert.deepEqual([history.answer(configure({ remat: 0 })), history.pending], [true, {}]);
});

test("a switch that is used twice before it is answered ends where it began", () => {
  const history = new History();
  history.note(configure({ fuse: false }), payload);
  history.note(configure({ fuse: true }), having(history.pending));
  assert.deepEqual(history.pending, { fuse: true });
  history.accept(having({ fuse: false }));
  assert.deepEqual(history.pending, { fuse: true });
  assert.deepEqual(history.undo(), configure({ fuse: false }));
});

test("of two that wait the older one is refused, and the other one can still be undone", () => {
  const history = new History();
  history.note(configure({ fuse: false }), payload);
  history.accept(having({ fuse: false }));
  history.undo();
  history.accept(payload);
  history.note(configure({ freeze: ["x"] }), payload);
  history.note(configure({ remat: 0 }), having(history.pending));
  assert.equal(history.refuse(), true);
  assert.deepEqual([history.pending, history.canRedo], [{ remat: 0 }, false]);
  assert.deepEqual([history.undo(), history.canUndo], [configure({ remat: 0.5 }), false]);
});

test("what nobody will answer was never chosen", () => {
  const history = new History();
  history.note(configure({ fuse: false }), payload);
  history.note(configure({ remat: 0 }), having(history.pending));
  history.giveUp();
  assert.deepEqual([history.pending, history.canUndo, history.canRedo], [{}, false, false]);
});
