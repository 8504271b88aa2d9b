// The effects of a pass on the sizes of the program, in figures. It needs no DOM.

import { bounds, formatBytes, formatTime, signed } from "../parts/dom.js";

/** @typedef {{ text: string, mood: "gain" | "cost" | "none", title: string, isPredicted?: boolean }} Effect */

/**
 * Operators, saved bytes, peak and time, in this order; what is unknown has an empty text. They are what the switch changes of
 * the headline: the step as it is shown, beside the step without the pass. While that is not known they are what the pass changed
 * in its place among the others.
 * @param {PassRecord} one @param {Pick<Payload, "clock" | "summary">} payload @returns {[Effect, Effect, Effect, Effect]}
 */
export function effects(one, { clock, summary }) {
  const { without } = one;
  const sizes = /** @type {const} */ (["ops", "saved_bytes", "peak_bytes"]);
  const [ops, saved, peak] = sizes.map((name) => (without ? /** @type {[number, number]} */ ([without[name], summary[name][1]]) : one[name]));
  const place = isInPlace(one) ? ", in its place among the passes" : "";
  return [
    change(ops, signed, `ops${place}`),
    change(saved, signedBytes, `kept for the backward${place}`),
    change(peak, signedBytes, `static peak${without ? "" : " of forward and backward"}${place}`),
    time(one, clock, place),
  ];
}

/** Whether its figures are of its place among the passes, and not yet what its switch changes. @param {PassRecord} one */
export function isInPlace({ changed, without }) {
  return changed && !without;
}

/** @param {[number, number] | null} sizes @param {(by: number) => string} format @param {string} label @returns {Effect} */
function change(sizes, format, label) {
  if (!sizes) return { text: "", mood: "none", title: `${label}: the pass did not run` };
  const [before, after] = sizes;
  const plain = format === signed ? String : formatBytes;
  const title = `${label}: ${plain(before)} → ${plain(after)}`;
  if (before === after) return { text: "·", mood: "none", title: `${label}: unchanged, ${plain(before)}` };
  if (plain !== String && isUnseen(after - before, sizes)) return { text: "·", mood: "none", title };
  return { text: format(after - before), mood: after < before ? "gain" : "cost", title };
}

/** Less than a thousandth of the whole is no change that anybody sees. @param {number} by @param {[number, number]} sides */
function isUnseen(by, sides) {
  return Math.abs(by) < 1e-3 * Math.max(...sides);
}

/** "−1.2 MiB", "+256 B". @param {number} by */
export function signedBytes(by) {
  return by > 0 ? `+${formatBytes(by)}` : formatBytes(by);
}

/** By the clock of the headline: measured alone where that is the device that was measured. @param {PassRecord} one @param {Clock} clock @param {string} place @returns {Effect} */
function time({ delta_ms: alone, delta_us: us, without }, { kinds, device, chosen, takes_us: steps }, place) {
  const known = alone && !alone.stale ? measured(alone) : null;
  if (known && chosen === "here") return known;
  if (us === null) return { text: "", mood: "none", title: "time: the pass did not run" };
  const by = without ? steps[1] - without.step_us : us;
  const kind = without?.kind ?? (kinds[0] === "measured" ? "predicted" : kinds[0]);
  const title = `time: the step with it minus the step without it${place}, ${kind} for ${device}${known ? `; ${known.title}` : ""}`;
  if (isUnseen(by, steps)) return { text: "·", mood: "none", title };
  return { text: `${by < 0 ? "−" : "+"}${formatTime(Math.abs(by))}`, mood: by < 0 ? "gain" : "cost", title, isPredicted: kind === "predicted" };
}

/** What the pass alone adds to the step; no gain or cost where the interval holds zero, or of one sample. @param {NonNullable<PassRecord["delta_ms"]>} delta @returns {Effect} */
function measured(delta) {
  const { median, low, high, samples, provenance } = delta;
  if (samples === 0) return { text: "·", mood: "none", title: `time: ${provenance}` };
  const spread = (high - low) / 2;
  // Two digits of the spread, and no more of the median than that.
  const digits = spread > 0 ? Math.min(3, Math.max(0, 1 - Math.floor(Math.log10(spread)))) : 3;
  const mood = samples === 1 ? "none" : high < 0 ? "gain" : low > 0 ? "cost" : "none";
  const title = `time: the step with it minus the step without it: ${median} ms, 95 % interval: ${bounds(delta, (one) => `${one} ms`)}; ${provenance}`;
  const sign = median < 0 ? "−" : "+";
  return { text: `${sign}${Math.abs(median).toFixed(digits)}${samples === 1 ? "" : ` ±${spread.toFixed(digits)}`} ms`, mood, title };
}
