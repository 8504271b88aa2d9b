import assert from "node:assert/strict";
import test from "node:test";

import { bounded, fitWidth, overlaps, revealed, zoomed } from "./viewport.js";

const GRAPH = { x: -500, y: 0, w: 1000, h: 20_000 };
const VIEW = { w: 524, h: 400 };
const right = ({ x, scale }) => x + VIEW.w / scale;
const bottom = ({ y, scale }) => y + VIEW.h / scale;

test("the whole width is in view at first, from the top, never larger than life", () => {
  const camera = fitWidth(GRAPH, VIEW);
  assert.ok(camera.x <= -500 && right(camera) >= 500 && camera.scale > 0.45);
  assert.ok(camera.y < 0 && camera.y > -100);
  assert.equal(fitWidth({ ...GRAPH, w: 100 }, VIEW).scale, 1);
});

test("it never leaves the graph", () => {
  const scale = 1;
  const far = bounded({ x: 1e6, y: 1e6, scale }, GRAPH, VIEW);
  assert.ok(right(far) >= 500 && far.x < 500 && bottom(far) >= 20_000 && far.y < 20_000);
  const near = bounded({ x: -1e6, y: -1e6, scale }, GRAPH, VIEW);
  assert.ok(near.x < -500 && right(near) > -500 && near.y < 0 && bottom(near) > 0);
  const narrow = bounded({ x: 77, y: 0, scale }, { ...GRAPH, x: 0, w: 100 }, VIEW);
  assert.equal(narrow.x + VIEW.w / 2, 50);
});

test("zooming keeps what is under the pointer", () => {
  const camera = { x: 10, y: 20, scale: 0.5 };
  const at = { x: 300, y: 100 };
  const next = zoomed(camera, 2, at);
  assert.equal(next.scale, 1);
  assert.deepEqual([next.x + at.x / next.scale, next.y + at.y / next.scale], [10 + 600, 20 + 200]);
  assert.equal(zoomed(camera, 1e9, at).scale, 3);
});

test("what is selected comes into view, and what is there already stays", () => {
  const camera = { x: 0, y: 0, scale: 1 };
  const seen = { x: 100, y: 100, w: 100, h: 40 };
  assert.deepEqual(revealed(camera, seen, VIEW), camera);
  const next = revealed(camera, { ...seen, y: 5000 }, VIEW);
  assert.ok(next.y > 4600 && next.y < 5000 && next.x === 0);
});

test("rectangles overlap or do not", () => {
  const one = { x: 0, y: 0, w: 10, h: 10 };
  assert.ok(overlaps(one, { x: 9, y: 9, w: 1, h: 1 }) && !overlaps(one, { x: 10, y: 0, w: 5, h: 5 }));
});
