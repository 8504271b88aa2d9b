import assert from "node:assert/strict";
import test from "node:test";

import { effects, isInPlace } from "./effects.js";

const pass = { name: "cat", enabled: true, changed: true, error: null, ops: [10, 8], saved_bytes: [0, 2048], peak_bytes: [512, 512], delta_ms: null, delta_us: null, without: null };
const clock = { kinds: ["measured", "predicted"], device: "X", chosen: "here", takes_us: [9000, 8000] };
const summary = { ops: [20, 7], saved_bytes: [0, 1024], peak_bytes: [4096, 2048] };
const of = (one, by = clock) => effects(one, { clock: by, summary });
const texts = (one) => of(one).map(({ text }) => text);
const moods = (one) => of(one).map(({ mood }) => mood);

test("less is a gain, more a cost, the same a dot", () => {
  assert.deepEqual(texts(pass), ["−2", "+2 KiB", "·", ""]);
  assert.deepEqual(moods(pass), ["gain", "cost", "none", "none"]);
  assert.match(of(pass)[1].title, /0 B → 2 KiB/);
});

test("less than a thousandth of what a pass changes is a dot, and its title says both sizes", () => {
  const saved = of({ ...pass, saved_bytes: [34 << 20, (34 << 20) + 2] })[1];
  assert.deepEqual([saved.text, saved.mood], ["·", "none"]);
  assert.match(saved.title, /34 MiB → 34 MiB/);
});

test("a time is a gain or a cost only where its interval leaves zero out", () => {
  const delta = (median, low, high, samples = 20) => ({ ...pass, delta_ms: { median, low, high, samples, coverage: 0.96, provenance: "measured on X", stale: false } });
  assert.deepEqual([delta(-1.5, -1.6, -1.4), delta(0.2, 0.1, 0.3), delta(-0.1, -0.3, 0.2)].map((one) => moods(one)[3]), ["gain", "cost", "none"]);
  assert.equal(texts(delta(-1.5, -1.6, -1.4))[3], "−1.50 ±0.10 ms");
  assert.equal(texts(delta(-0.034, -0.184, 0.116))[3], "−0.03 ±0.15 ms");
  assert.equal(texts(delta(25, 13, 37))[3], "+25 ±12 ms");
  const once = delta(-1.5, -1.5, -1.5, 1);
  assert.deepEqual([texts(once)[3], moods(once)[3]], ["−1.500 ms", "none"]);
  assert.match(of(once)[3].title, /one sample/);
  assert.deepEqual([texts(delta(0, 0, 0, 0))[3], of(delta(0, 0, 0, 0))[3].title], ["·", "time: measured on X"]);
});

test("what did not run says so", () => {
  const off = { ...pass, ops: null, saved_bytes: null, peak_bytes: null };
  assert.deepEqual(texts(off), ["", "", "", ""]);
  assert.match(of(off)[3].title, /did not run/);
});

test("without a measurement of its own a pass has its part of what the clock says", () => {
  const gain = (us) => ({ ...pass, delta_us: us });
  assert.deepEqual([gain(-1500), gain(20), gain(-2)].map((one) => texts(one)[3]), ["−1.50 ms", "+20.0 µs", "·"]);
  assert.deepEqual([gain(-1500), gain(20), gain(-2)].map((one) => moods(one)[3]), ["gain", "cost", "none"]);
  assert.match(of(gain(-1500))[3].title, /predicted for X/);
  assert.deepEqual(of(gain(-1500))[3].isPredicted, true);
});

const without = { ops: 9, saved_bytes: 1024, peak_bytes: 1024, step_us: 7000, kind: "predicted" };

test("beside a switch stands what it changes of the headline, whatever the pass did in its place", () => {
  const one = { ...pass, delta_us: -1500, without };
  assert.deepEqual(texts(one), ["−2", "·", "+1 KiB", "+1.00 ms"]);
  assert.deepEqual(moods(one), ["gain", "none", "cost", "cost"]);
  assert.deepEqual([pass, one, { ...pass, changed: false }].map(isInPlace), [true, false, false]);
  assert.match(of(pass)[0].title, /in its place among the passes/);
  assert.doesNotMatch(of(one).map(({ title }) => title).join(), /in its place/);
});

test("what was measured on another device than the headline's stands in its words alone", () => {
  const delta_ms = { median: 3, low: 2.9, high: 3.1, samples: 20, coverage: 0.96, provenance: "measured on a CPU", stale: false };
  const one = { ...pass, delta_us: -1500, without: { ...without, kind: "modelled" }, delta_ms };
  const elsewhere = { ...clock, kinds: ["modelled", "modelled"], chosen: "default" };
  const [, , , time] = of(one, elsewhere);
  assert.equal(time.text, "+1.00 ms");
  assert.match(time.title, /modelled for X; .* 3 ms, .*measured on a CPU/);
  assert.equal(texts(one)[3], "+3.00 ±0.10 ms");
  assert.equal(texts({ ...one, delta_ms: { ...delta_ms, stale: true } })[3], "+1.00 ms");
});
