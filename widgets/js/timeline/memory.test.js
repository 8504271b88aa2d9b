import assert from "node:assert/strict";
import test from "node:test";

import { arranged, under } from "./bands.js";
import { encode, measured } from "./events.js";
import { aliveAt, byPurpose, highest, isOf, outline, profile } from "./memory.js";

/** @param {number[][]} rows start, duration, value, lane */
function program(rows, lanes, values) {
  const column = (i) => rows.map((row) => row[i]);
  const events = encode({
    start: Float64Array.from(column(0)),
    duration: Float32Array.from(column(1)),
    name: new Uint32Array(rows.length),
    value: Uint32Array.from(column(2)),
    delay: new Float32Array(rows.length).fill(NaN),
    lane: Uint16Array.from(column(3)),
  });
  return measured({ label: "captured", config: "", span_us: 40, lanes, names: ["op"], values, count: rows.length, events }, {});
}

const BOTH = [{ name: "stream 7", kind: "gpu" }, { name: "CPU", kind: "cpu" }];
const MEMORY = { ops: ["a", "view", "b"], live: [10, 30, 20], peak: 30, at: "view", alive: [], inputs: 5, storages: [0, 1, 5, 5, 1, 1, 20, 2, 2, 2, 15, 3] };

test("an op is where the GPU starts it, one without an event where the one before ends", () => {
  const one = program([[0, 1, 1, 1], [1, 1, 3, 1], [5, 10, 1, 0], [20, 10, 3, 0]], BOTH, MEMORY.ops);
  const found = profile(one, MEMORY);
  assert.deepEqual([...found.at], [5, 15, 20]);
  assert.equal(found.end, 40);
});

test("idle time is no op of the GPU", () => {
  const lanes = [{ name: "stream 7", kind: "gpu" }, { name: "idle", kind: "idle" }];
  const one = program([[0, 5, 3, 1], [5, 10, 1, 0], [20, 10, 3, 0]], lanes, MEMORY.ops);
  assert.deepEqual([...profile(one, MEMORY).at], [5, 15, 20]);
});

test("without a GPU the host's clock counts", () => {
  const one = program([[2, 1, 1, 0], [4, 1, 3, 0]], [BOTH[1]], MEMORY.ops);
  assert.deepEqual([...profile(one, MEMORY).at], [2, 3, 4]);
});

test("another program's memory has no place on this axis", () => {
  const one = program([[2, 1, 1, 0]], [BOTH[1]], ["a", "b"]);
  assert.equal(isOf(one, MEMORY.ops), false);
  assert.equal(profile(one, MEMORY), null);
});

test("the most bytes of a stretch, to the end and not after it", () => {
  const one = { ops: MEMORY.ops, live: MEMORY.live, at: Float64Array.of(5, 15, 20), end: 40 };
  assert.equal(highest(one, 6, 7), 0);
  assert.equal(highest(one, 6, 21), 1);
  assert.equal(highest(one, 25, 26), 2);
  assert.equal(highest(one, 0, 1), 0);
  assert.equal(highest(one, 40, 41), -1);
  assert.deepEqual([...outline(one, { from: 0, to: 50 }, 5)], [0, 1, 2, 2, -1]);
});

test("a peak of no duration is seen at any zoom", () => {
  const one = { ops: ["a", "b", "c"], live: [1, 9, 2], at: Float64Array.of(0, 10, 10), end: 20 };
  assert.deepEqual([...outline(one, { from: 0, to: 20 }, 2)], [0, 1]);
});

test("what is alive is parted by purpose, and adds up", () => {
  const columns = byPurpose(MEMORY);
  assert.deepEqual(columns.map((column) => [...column]), [[5, 5, 5], [0, 0, 0], [0, 20, 0], [0, 0, 15], [0, 0, 0], [5, 5, 0]]);
  assert.deepEqual(MEMORY.live, MEMORY.ops.map((_, op) => columns.reduce((sum, column) => sum + column[op], 0)));
  assert.deepEqual(aliveAt(MEMORY, 1), [["view", 20, 2], ["a", 5, 5]]);
});

test("rows stand apart, and memory takes what is left", () => {
  const one = program([[2, 1, 1, 0]], BOTH, ["a"]);
  const shown = [0, 1].map((number) => ({ program: one, memory: MEMORY, profile: null, measuredPeak: null, number, name: "", title: "" }));
  const layout = arranged(shown, 460);
  assert.ok(layout.height <= 460 && layout.height > 440);
  for (const [number, row] of layout.rows.entries()) {
    row.lanes.forEach((band, lane) => assert.deepEqual(under(layout, band.y + 5), { part: "lane", number, lane }));
    assert.equal(under(layout, row.memory.y + 5).part, "memory");
  }
  assert.equal(under(layout, 3).part, "overview");
  assert.equal(under(layout, layout.ruler.y + 3).part, "");
  assert.ok(arranged(shown, 10).rows[0].memory.height >= 40);
});
