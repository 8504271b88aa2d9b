// The time axis: which part of it is seen, its ticks, and times as text. All times are in µs. It needs no DOM.

/** @typedef {{ from: number, to: number }} Window */

const NARROWEST_US = 0.02;

/** A window of the same length that lies in 0…span, or all of it. @param {Window} window @param {number} span @returns {Window} */
export function inside({ from, to }, span) {
  const length = Math.min(span, Math.max(NARROWEST_US, to - from));
  const left = Math.min(Math.max(0, from), span - length);
  return { from: left, to: left + length };
}

/** `factor` times as much of the axis, with `at` where it was. @param {Window} window @param {number} factor @param {number} at @param {number} span */
export function zoomed({ from, to }, factor, at, span) {
  const length = Math.min(span, Math.max(NARROWEST_US, (to - from) * factor));
  const share = (at - from) / (to - from);
  return inside({ from: at - share * length, to: at + (1 - share) * length }, span);
}

/** @param {Window} window @param {number} by @param {number} span */
export function moved({ from, to }, by, span) {
  return inside({ from: from + by, to: to + by }, span);
}

/** Moved no more than needed for left…right to be seen, with a little room. @param {Window} window @param {number} left @param {number} right @param {number} span */
export function showing(window, left, right, span) {
  const room = 0.05 * (window.to - window.from);
  if (left >= window.from && right <= window.to) return window;
  if (right - left > window.to - window.from - 2 * room) return inside({ from: left - room, to: right + room }, span);
  return moved(window, left < window.from ? left - room - window.from : right + room - window.to, span);
}

/** Round times in the window, at least `apart` pixels from each other. @param {Window} window @param {number} pixels @param {number} apart */
export function ticks({ from, to }, pixels, apart) {
  const least = ((to - from) * apart) / pixels;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = power * ([1, 2, 5].find((digit) => digit * power >= least) ?? 10);
  const found = [];
  for (let number = Math.ceil(from / step); number * step <= to; number += 1) found.push(number * step);
  return { step, at: found };
}

/** A time on the axis, to the digit that `step` has: "1.25 ms". @param {number} time @param {number} step @param {number} span what decides the unit */
export function onAxis(time, step, span) {
  const [unit, size] = span >= 1000 ? ["ms", 1000] : ["µs", 1];
  const digits = Math.min(9, Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9)));
  return `${(time / size).toFixed(digits)} ${unit}`;
}

/** A duration with three significant digits: "12.3 µs", "1.25 ms". @param {number} time */
export function duration(time) {
  const [unit, size] = time >= 1e6 ? ["s", 1e6] : time >= 1000 ? ["ms", 1000] : time >= 1 || time === 0 ? ["µs", 1] : ["ns", 1e-3];
  const figure = time / size;
  return `${figure >= 100 || figure === 0 ? Math.round(figure) : figure.toPrecision(3)} ${unit}`;
}

/** @param {number} part @param {number} whole */
export function percent(part, whole) {
  return whole > 0 ? `${Math.round((100 * part) / whole)} %` : "0 %";
}
