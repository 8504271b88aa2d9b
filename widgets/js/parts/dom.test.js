import assert from "node:assert/strict";
import test from "node:test";

import { bounds, figure, formatBytes, formatChange, formatSeconds, plural, short, signed } from "./dom.js";

test("bytes carry their unit and three digits", () => {
  assert.equal(formatBytes(0), "0 B");
  assert.equal(formatBytes(1024), "1 KiB");
  assert.equal(formatBytes(-1536), "−1.5 KiB");
  assert.equal(formatBytes(3.25 * 2 ** 30), "3.25 GiB");
});

test("figures keep their zeros, short numbers do not", () => {
  assert.deepEqual([9.3, 10.26, 104.4].map(figure), ["9.30", "10.3", "104"]);
  assert.deepEqual([0, 2e-6, 1e-4].map(figure), ["0", "<0.0001", "0.0001"]);
  assert.deepEqual([9.3, 0.5, 120].map(short), ["9.3", "0.5", "120"]);
});

test("an interval says of how few samples it is, and one sample has none", () => {
  const of = (/** @type {number} */ samples, coverage = 0.96) => bounds({ median: 2, low: 1, high: 3, coverage, samples }, figure);
  assert.deepEqual([of(1, 0), of(3, 0.75), of(8)], ["one sample", "1.00–3.00 (75 %, 3 samples)", "1.00–3.00"]);
});

test("a change says its sign, and that there is none", () => {
  assert.equal(formatChange(100, 66), "−34 %");
  assert.equal(formatChange(100, 100), "unchanged");
  assert.equal(formatChange(1000, 1001), "±0 %");
  assert.equal(formatChange(0, 5), "");
  assert.deepEqual([-3, 0, 3].map(signed), ["−3", "±0", "+3"]);
});

test("seconds and plurals", () => {
  assert.equal(formatSeconds(0.0123), "12.3 ms");
  assert.equal(plural(1, "launch", "launches"), "1 launch");
  assert.equal(plural(2, "launch", "launches"), "2 launches");
});
