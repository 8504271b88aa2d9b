// The flame of the peak: every level has the bytes of the one above it, on either side.

import assert from "node:assert/strict";
import { test } from "node:test";

import { bars, tree } from "./flame.js";

/** @type {AtPeak} */
const AT_PEAK = {
  purposes: [["input", 40, 40], ["saved", 50, 20], ["temporary", 10, 0]],
  saved: [["h.*.mlp", "activation", 30, 0, 0, "gelu"], ["h.*.mlp", "matmul operand", 10, 10, 2, "mm"], ["h.*.attn", "attention", 5, 5, 2, "sdpa"], ["head", "softmax or loss", 5, 5, 1, "lse"]],
  at: ["mm_9", "mm_4"],
};
/** @param {0 | 1} side */
const drawn = (side) => bars(tree(AT_PEAK), side).map(({ block, level, from, to }) => `${"  ".repeat(level)}${block.name} ${Math.round(100 * from)}–${Math.round(100 * to)}`);

test("blocks lie within what they are part of, the largest first", () => {
  assert.deepEqual(drawn(0), [
    "peak 0–100", "  saved 0–50", "    h.* 0–45", "      mlp 0–40", "        activation 0–30", "        matmul operand 30–40", "      attn 40–45", "        attention 40–45",
    "    head 45–50", "      softmax or loss 45–50", "  input 50–90", "  temporary 90–100",
  ]);
});

test("both sides have one scale and one order, and nothing of no bytes", () => {
  assert.deepEqual(drawn(1), [
    "peak 0–60", "  saved 0–20", "    h.* 0–15", "      mlp 0–10", "        matmul operand 0–10", "      attn 10–15", "        attention 10–15", "    head 15–20", "      softmax or loss 15–20",
    "  input 20–60",
  ]);
});

test("what is inside a block sums to it", () => {
  const check = (/** @type {ReturnType<typeof tree>} */ one) => {
    if (one.inside.length > 0 && (one.kind === "module" || one.name === "saved" || one.kind === "peak")) {
      for (const side of [0, 1]) assert.equal(one.inside.reduce((sum, { bytes }) => sum + bytes[side], 0), one.bytes[side], one.name);
    }
    one.inside.forEach(check);
  };
  check(tree(AT_PEAK));
});

test("a module of its own and the modules in it stand beside each other", () => {
  const saved = /** @type {AtPeak["saved"]} */ ([["h", "mask", 3, 3, 1, "m"], ["h.*", "mask", 4, 4, 2, "n"]]);
  const [home] = tree({ ...AT_PEAK, purposes: [["saved", 7, 7]], saved }).inside;
  assert.deepEqual(home.inside[0].inside.map(({ name, bytes }) => [name, bytes[1]]), [["*", 4], ["mask", 3]]);
});
