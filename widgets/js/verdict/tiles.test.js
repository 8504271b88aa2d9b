import assert from "node:assert/strict";
import { test } from "node:test";

import { ownTime } from "./tiles.js";

test("a second time on the CPU is told only where rounds tell it from the first", () => {
  const of = (/** @type {string} */ verdict, stale = false) => {
    const row = { label: "step", verdict, baseline_ms: { median: 356 }, variant_ms: { median: 380 } };
    return ownTime(/** @type {any} */ ({ runs_triton: false, clock: { chosen: "H100" }, timing: { rows: [row], stale } }));
  };
  assert.equal(of("slower"), "On this CPU a step took 356 ms, measured; with the passes 380 ms, whose kernels need a GPU.");
  assert.equal(of("too few rounds to say (1 of 8)"), "On this CPU a step took 356 ms, measured; with the passes: too few rounds to say (1 of 8).");
  assert.equal(of("faster", true), "On this CPU a step took 356 ms, measured.");
});
