import assert from "node:assert/strict";
import test from "node:test";

import { duration, inside, moved, onAxis, showing, ticks, zoomed } from "./axis.js";

test("zooming leaves what is under the pointer where it is", () => {
  const found = zoomed({ from: 0, to: 100 }, 0.5, 25, 100);
  assert.deepEqual(found, { from: 12.5, to: 62.5 });
  assert.deepEqual(zoomed(found, 100, 25, 100), { from: 0, to: 100 });
  const least = zoomed(found, 1e-12, 25, 100);
  assert.ok(least.to - least.from >= 0.019 && least.from <= 25 && least.to >= 25);
});

test("a window stays on the axis", () => {
  assert.deepEqual(moved({ from: 10, to: 30 }, -50, 100), { from: 0, to: 20 });
  assert.deepEqual(moved({ from: 10, to: 30 }, 500, 100), { from: 80, to: 100 });
  assert.deepEqual(inside({ from: -5, to: 500 }, 100), { from: 0, to: 100 });
});

test("what is in sight moves nothing; what is not comes in at the nearer edge", () => {
  const window = { from: 20, to: 40 };
  assert.equal(showing(window, 25, 30, 100), window);
  assert.deepEqual(showing(window, 50, 52, 100), { from: 33, to: 53 });
  assert.deepEqual(showing(window, 10, 12, 100), { from: 9, to: 29 });
  assert.deepEqual(showing(window, 50, 90, 100), { from: 49, to: 91 });
});

test("ticks are round and apart", () => {
  assert.deepEqual(ticks({ from: 3, to: 103 }, 500, 90), { step: 20, at: [20, 40, 60, 80, 100] });
  assert.deepEqual(ticks({ from: 0, to: 1 }, 100, 90), { step: 1, at: [0, 1] });
});

test("times carry their unit", () => {
  assert.deepEqual([0, 0.5, 12.34, 1234, 2e6].map(duration), ["0 µs", "500 ns", "12.3 µs", "1.23 ms", "2.00 s"]);
  assert.equal(duration(123456), "123 ms");
  assert.equal(onAxis(1250, 50, 5000), "1.25 ms");
  assert.equal(onAxis(40, 20, 100), "40 µs");
});
