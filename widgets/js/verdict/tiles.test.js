import assert from "node:assert/strict";
import { test } from "node:test";

import { meaning, ownTime } from "./tiles.js";

test("a second time on the CPU is told only where rounds tell it from the first", () => {
  const of = (/** @type {string} */ verdict, stale = false) => {
    const row = { label: "step", verdict, baseline_ms: { median: 356 }, variant_ms: { median: 380 } };
    return ownTime(/** @type {any} */ ({ runs_triton: false, clock: { chosen: "H100" }, timing: { rows: [row], stale } }));
  };
  assert.deepEqual(of("slower"), ["356 → 380 ms", " a step with the passes, whose kernels need a GPU"]);
  assert.deepEqual(of("too few rounds to say (1 of 8)"), ["1 of 8 rounds", ": press Measure again"]);
  assert.deepEqual(of("no difference seen"), ["356 ms", " a step; with the passes: no difference seen"]);
  assert.deepEqual(of("faster", true), ["356 ms", " a step"]);
});

test("of a step that counts its launches nothing says that none is counted", () => {
  const of = (/** @type {[number, number] | null} */ launches) => meaning({ kinds: ["modelled", "modelled"], launches });
  assert.match(of(null), /no launch counted/);
  assert.match(of([20, 10]), /launching its kernels one by one/);
  assert.doesNotMatch(of([20, 10]), /no launch counted/);
});
