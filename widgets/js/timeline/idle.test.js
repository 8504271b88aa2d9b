import assert from "node:assert/strict";
import test from "node:test";

import { atWork, encode, KINDS, measured, shares } from "./events.js";
import { byCause, causeOf } from "./idle.js";

const LANES = [
  { name: "stream 7", kind: "gpu" },
  { name: "idle", kind: "idle" },
  { name: "python", kind: "cpu" },
];
const NAMES = ["gemm", "synchronization: aten::item, cudaStreamSynchronize", "launch latency", "aten::item", "cudaStreamSynchronize", "synchronization: aten::nonzero"];

/** @param {number[][]} rows start, duration, name, value, lane */
function program(rows) {
  const column = (i) => rows.map((row) => row[i]);
  const events = encode({
    start: Float64Array.from(column(0)),
    duration: Float32Array.from(column(1)),
    name: Uint32Array.from(column(2)),
    value: Uint32Array.from(column(3)),
    delay: new Float32Array(rows.length).fill(NaN),
    lane: Uint16Array.from(column(4)),
  });
  return measured({ label: "run", config: "", span_us: 100, lanes: LANES, names: NAMES, values: ["mm #1", "item #1"], count: rows.length, events }, {});
}

const ROWS = [
  [0, 10, 0, 1, 0],
  [10, 2, 2, 1, 1],
  [12, 20, 0, 1, 0],
  [30, 40, 3, 2, 2],
  [31, 38, 4, 0, 2],
  [32, 8, 1, 1, 1],
  [40, 20, 0, 1, 0],
  [60, 30, 5, 1, 1],
];

test("gaps have the kind of idle time, what is inherent another one, waits of the host their own", () => {
  const kinds = [...program(ROWS).kinds].map((kind) => KINDS[kind].id);
  assert.deepEqual(kinds, ["matmul", "pause", "matmul", "other", "wait", "idle", "matmul", "idle"]);
});

test("gaps add up by cause, the longest first, each with its longest gap", () => {
  const one = program(ROWS);
  assert.deepEqual(byCause(one, one.lanes[1]), [
    { cause: "synchronization", time: 38, count: 2, longest: 7 },
    { cause: "launch latency", time: 2, count: 1, longest: 1 },
  ]);
  assert.equal(causeOf("host idle"), "host idle");
});

test("a gap is not what a value did, and keeps nobody busy", () => {
  const one = program(ROWS);
  assert.deepEqual(atWork(one, [0, 1, 2, 5, 6, 7]), [0, 2, 6]);
  assert.deepEqual(atWork(one, [1, 3]), [3]);
  assert.deepEqual([...shares(one, 100, 10)].slice(6), [1, 0, 0, 0]);
});
