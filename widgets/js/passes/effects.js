// The effects of a pass on the sizes of the program, in figures. It needs no DOM.

import { bounds, formatBytes, formatTime, signed } from "../parts/dom.js";

const BUILT_IN = new Set(["simplify", "freeze", "cat", "linear_cross_entropy", "decompose", "pad", "remat", "optimizer_step", "fuse", "overlap"]);

/** Whether the pass was registered by the user. @param {PassRecord} one */
export function isOwn(one) {
  return !BUILT_IN.has(one.name);
}

/** @typedef {{ text: string, mood: "gain" | "cost" | "none", title: string, isPredicted?: boolean }} Effect */

/**
 * Operators, saved bytes, peak and time, in this order; what is unknown has an empty text.
 * @param {PassRecord} one @param {Clock} clock @returns {[Effect, Effect, Effect, Effect]}
 */
export function effects(one, clock) {
  return [
    change(one.ops, signed, "ops"),
    change(one.saved_bytes, signedBytes, "kept for the backward"),
    change(one.peak_bytes, signedBytes, "static peak of forward and backward"),
    one.delta_ms ? time(one.delta_ms) : part(one.delta_us, clock),
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

/** What the pass changed of the step, by the clock; those of all passes sum to what they changed together. @param {number | null} us @param {Clock} clock @returns {Effect} */
function part(us, { kinds, device, step_us: steps }) {
  if (us === null) return { text: "", mood: "none", title: "time: the pass did not run" };
  const kind = kinds[0] === "measured" ? "predicted" : kinds[0];
  const title = `time: what it changed of the step in its place among the passes, ${kind} for ${device}`;
  // Less than a thousandth of the step is no change that anybody sees.
  if (Math.abs(us) < 1e-3 * Math.max(...steps)) return { text: "·", mood: "none", title: `${title}: nothing` };
  return { text: `${us < 0 ? "−" : "+"}${formatTime(Math.abs(us))}`, mood: us < 0 ? "gain" : "cost", title, isPredicted: kind === "predicted" };
}

/** What the pass alone adds to the step, measured; no gain or cost where the interval holds zero, or of one sample. @param {NonNullable<PassRecord["delta_ms"]>} delta @returns {Effect} */
function time(delta) {
  const { median, low, high, samples, provenance, stale } = delta;
  if (samples === 0) return { text: "·", mood: "none", title: `time: ${provenance}` };
  const spread = (high - low) / 2;
  // Two digits of the spread, and no more of the median than that.
  const digits = spread > 0 ? Math.min(3, Math.max(0, 1 - Math.floor(Math.log10(spread)))) : 3;
  const mood = samples === 1 ? "none" : high < 0 ? "gain" : low > 0 ? "cost" : "none";
  const title = `time: with it minus without it, all others kept: ${median} ms, 95 % interval: ${bounds(delta, (one) => `${one} ms`)}; ${provenance}`;
  const sign = median < 0 ? "−" : "+";
  return { text: `${sign}${Math.abs(median).toFixed(digits)}${samples === 1 ? "" : ` ±${spread.toFixed(digits)}`} ms`, mood, title: stale ? `${title}; of other passes: measure again` : title };
}
