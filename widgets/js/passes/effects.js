// The effects of a pass on the sizes of the program, in figures. It needs no DOM.

import { bounds, formatBytes, signed } from "../parts/dom.js";

const BUILT_IN = new Set(["simplify", "freeze", "cat", "decompose", "pad", "remat", "optimizer_step", "fuse"]);

/** Whether the pass was registered by the user. @param {PassRecord} one */
export function isOwn(one) {
  return !BUILT_IN.has(one.name);
}

/** On, and nothing came of it: the program that it left is the one that it was given. @param {PassRecord} one */
export function isIdle(one) {
  return one.enabled && !one.changed && one.error === null;
}

/** @typedef {{ text: string, mood: "gain" | "cost" | "none", title: string }} Effect */

/**
 * Operators, saved bytes, peak and time, in this order; what is unknown has an empty text.
 * @param {PassRecord} one @returns {[Effect, Effect, Effect, Effect]}
 */
export function effects(one) {
  return [
    change(one.ops, signed, "ops"),
    change(one.saved_bytes, signedBytes, "kept for the backward"),
    change(one.peak_bytes, signedBytes, "peak memory, static"),
    time(one.delta_ms),
  ];
}

/** @param {[number, number] | null} sizes @param {(by: number) => string} format @param {string} label @returns {Effect} */
function change(sizes, format, label) {
  if (!sizes) return { text: "", mood: "none", title: `${label}: the pass did not run` };
  const [before, after] = sizes;
  const plain = format === signed ? String : formatBytes;
  const title = `${label}: ${plain(before)} → ${plain(after)}`;
  if (before === after) return { text: "·", mood: "none", title: `${label}: unchanged, ${plain(before)}` };
  return { text: format(after - before), mood: after < before ? "gain" : "cost", title };
}

/** "−1.2 MiB", "+256 B". @param {number} by */
export function signedBytes(by) {
  return by > 0 ? `+${formatBytes(by)}` : formatBytes(by);
}

/** What the pass alone adds to the step; no gain or cost where the interval holds zero, or of one sample. @param {PassRecord["delta_ms"]} delta @returns {Effect} */
function time(delta) {
  if (!delta) return { text: "", mood: "none", title: "time: not measured. Press “Measure each pass”" };
  const { median, low, high, samples, provenance, stale } = delta;
  if (samples === 0) return { text: "·", mood: "none", title: `time: ${provenance}` };
  const spread = (high - low) / 2;
  // Two digits of the spread, and no more of the median than that.
  const digits = spread > 0 ? Math.min(3, Math.max(0, 1 - Math.floor(Math.log10(spread)))) : 3;
  const mood = samples === 1 ? "none" : high < 0 ? "gain" : low > 0 ? "cost" : "none";
  const title = `time: with it minus without it, all others kept: ${median} ms, 95 % interval: ${bounds(delta, (one) => `${one} ms`)}; ${provenance}`;
  const sign = median < 0 ? "−" : "+";
  return { text: `${sign}${Math.abs(median).toFixed(digits)}${samples === 1 ? "" : ` ±${spread.toFixed(digits)}`}`, mood, title: stale ? `${title}; of other passes: measure again` : title };
}
