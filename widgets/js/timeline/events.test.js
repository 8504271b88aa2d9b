import assert from "node:assert/strict";
import test from "node:test";

import { atWork, between, decode, encode, eventsOf, kindOf, KINDS, measured, modelled, nearest, shares, spans, sums } from "./events.js";

/** @param {number[][]} rows start, duration, name, value, lane */
function columns(rows) {
  const column = (i) => rows.map((row) => row[i]);
  return {
    start: Float64Array.from(column(0)),
    duration: Float32Array.from(column(1)),
    name: Uint32Array.from(column(2)),
    value: Uint32Array.from(column(3)),
    delay: Float32Array.from(rows, (row) => row[5] ?? NaN),
    lane: Uint16Array.from(column(4)),
  };
}

const LANES = [
  { name: "stream 7", kind: "gpu" },
  { name: "CPU", kind: "cpu" },
];

function program(rows, records = {}) {
  const raw = { label: "captured", config: "", span_us: 100, lanes: LANES, names: ["aten.mm.default", "elementwise", "sgemm"], values: ["mm", "add"] };
  return measured({ ...raw, count: rows.length, events: encode(columns(rows)) }, records);
}

const ROWS = [
  [0, 2, 0, 1, 1],
  [1, 10, 2, 1, 0],
  [11, 4, 1, 2, 0],
  [20, 5, 1, 0, 0],
];

test("columns survive the wire, wherever the bytes begin", () => {
  const sent = encode(columns(ROWS));
  const moved = new Uint8Array(sent.byteLength + 3);
  moved.set(new Uint8Array(sent.buffer), 3);
  const found = decode({ count: 4, events: new DataView(moved.buffer, 3) });
  assert.deepEqual(found, columns(ROWS));
  assert.equal(sent.byteLength, 4 * 26);
  assert.throws(() => decode({ count: 5, events: sent }), { name: "RangeError", message: /5 events take 130 bytes, not 104/ });
});

test("an event of the GPU is of the kind that the host called its op", () => {
  const { kinds } = program(ROWS);
  assert.deepEqual([...kinds].map((kind) => KINDS[kind].id), ["matmul", "matmul", "other", "other"]);
});

test("kinds go by names", () => {
  const found = ["fused_add_gelu_1a2b", "aten.addmm.default", "_scaled_dot_product_flash_attention", "aten._to_copy.default", "aten.cat.default", "aten.native_layer_norm.default", "aten.mul.Tensor", "sm90_xmma_gemm_bf16"];
  assert.deepEqual(found.map((name) => KINDS[kindOf(name)].id), ["kernel", "matmul", "attention", "copy", "copy", "reduction", "other", "matmul"]);
});

test("the nearest event within reach; of several, the one that began last", () => {
  const one = program([[0, 10, 1, 1, 0], [4, 1, 1, 2, 0], [30, 1, 1, 1, 0]]);
  const [lane] = one.lanes;
  assert.equal(nearest(one, lane, 4.5, 0), 1);
  assert.equal(nearest(one, lane, 8, 0), 0);
  assert.equal(nearest(one, lane, 12, 1), -1);
  assert.equal(nearest(one, lane, 12, 2.5), 0);
  assert.equal(nearest(one, lane, 28, 5), 2);
  assert.equal(nearest(one, lane, 1000, Infinity), 2);
});

test("a long event that began early is still found late", () => {
  const one = program([[0, 90, 1, 1, 0], [1, 1, 1, 2, 0], [3, 1, 1, 2, 0]]);
  assert.deepEqual(between(one, one.lanes[0], 50, 60), [0, 3]);
  assert.deepEqual(between(one, one.lanes[0], 95, 99), [3, 3]);
});

test("busy and idle add up, overlaps count once, gaps are what lies between", () => {
  const found = sums(program(ROWS), program(ROWS).lanes[0], 5, 30);
  assert.deepEqual({ ...found, top: [] }, { busy: 15, idle: 10, gaps: 2, longest: 5, count: 3, top: [] });
  assert.deepEqual(found.top, [{ name: "elementwise", time: 9, count: 2 }, { name: "aten.mm.default", time: 6, count: 1 }]);
  const nested = program([[0, 10, 1, 1, 0], [4, 1, 1, 2, 0]]);
  assert.equal(sums(nested, nested.lanes[0], 0, 10).busy, 10);
  assert.equal(sums(nested, nested.lanes[0], 0, 10).gaps, 0);
});

test("where a value has events on the GPU, the CPU only asked for them", () => {
  const one = program(ROWS);
  assert.deepEqual(eventsOf(one, "mm"), [0, 1]);
  assert.deepEqual(atWork(one, [0, 1]), [1]);
  assert.deepEqual(atWork(one, [0]), [0]);
});

test("the overview has the share of the busiest lane", () => {
  assert.deepEqual([...shares(program([[0, 10, 0, 0, 0], [20, 10, 0, 0, 1], [20, 10, 0, 0, 0]]), 40, 4)], [1, 0, 1, 0]);
});

test("narrow events share a column, of the kind of most of their time; wide ones stand alone", () => {
  const one = program([[0, 0.1, 0, 0, 0], [0.2, 0.3, 1, 0, 0], [10, 20, 0, 0, 0]]);
  const drawn = [];
  spans(one, one.lanes[0], { from: 0, to: 100 }, 100, null, (...span) => drawn.push(span));
  assert.equal(drawn.length, 2);
  const [x, width, kind, share, event, faint] = drawn[0];
  assert.deepEqual([x, width, KINDS[kind].id, event, faint], [0, 1, "other", -1, false]);
  assert.ok(Math.abs(share - 0.4) < 1e-6);
  assert.deepEqual(drawn[1].slice(0, 2), [10, 20]);
  assert.equal(drawn[1][4], 2);
});

test("what was found is not hidden in a column by what was not", () => {
  const one = program([[0, 0.1, 0, 0, 0], [0.2, 0.6, 1, 0, 0], [3, 0.1, 1, 0, 0]]);
  const drawn = [];
  spans(one, one.lanes[0], { from: 0, to: 100 }, 100, Uint8Array.of(1, 0, 0), (...span) => drawn.push(span));
  assert.deepEqual(drawn.map((span) => [KINDS[span[2]].id, span[5]]), [["matmul", false], ["other", true]]);
});

test("without a measured timeline, ops stand end to end with their own times", () => {
  const value = (op, phase, before, after, kernel = "") => ({ op, phase, time_us: [before, after], kernel });
  const records = {
    mm: value("aten.mm.default", "forward", 4, 3),
    view: value("aten.view.default", "forward", null, null),
    add_1: value("fused_add_1a", "backward", 2, 1, "fused_add_1a"),
  };
  const before = modelled("captured", ["mm", "view", "add_1"], records, 0);
  assert.deepEqual([...before.columns.start], [0, 4]);
  assert.deepEqual([...before.columns.value], [1, 3]);
  assert.deepEqual(before.names, ["aten.mm.default", "add"]);
  assert.equal(before.span, 6);
  assert.equal(before.lanes[0].backward, 4);
  assert.deepEqual(eventsOf(before, "add_1"), [1]);
  assert.deepEqual(eventsOf(before, "view"), []);
  const after = modelled("optimised", ["mm", "add_1"], records, 1);
  assert.deepEqual([...after.kinds].map((kind) => KINDS[kind].id), ["matmul", "kernel"]);
  assert.equal(modelled("optimised", ["view"], records, 1).span, 0);
});

test("50,000 events: every one is found again, and a frame draws a column a pixel", () => {
  const count = 50_000;
  const rows = Array.from({ length: count }, (_, i) => [i, 0.8, i % 3, 0, i % 2]);
  const one = program(rows);
  for (let event = 1; event < count; event += 997) assert.equal(nearest(one, one.lanes[event % 2], event + 0.4, 0), event);
  const whole = sums(one, one.lanes[0], 0, count);
  assert.equal(whole.count, count / 2);
  assert.ok(Math.abs(whole.busy - (count / 2) * 0.8) < 1);
  let columnsDrawn = 0;
  let busy = 0;
  const frames = 20;
  for (let i = 0; i < frames; i += 1) {
    spans(one, one.lanes[0], { from: 0, to: count }, 1000, null, (_, __, ___, share) => {
      columnsDrawn += 1;
      busy += share;
    });
  }
  assert.equal(columnsDrawn, frames * 1000);
  assert.ok(Math.abs(busy / (frames * 1000) - 0.4) < 0.01);
});
