// Buttons, badges and figures that several panels show alike.

import { bounds, figure, h, plain } from "./dom.js";
import { time } from "./modules.js";

export const NEEDS_KERNEL = "there is no kernel behind this view: run it in a notebook";
/** How there are times of what is shown now. @param {boolean} live */
export const toMeasure = (live) => (live ? "Measure again for the passes chosen now." : "Run its cell to measure these passes.");
export const NOT_HELD = "no kernel is behind this view, which holds no such choice: run it in a notebook";

/** Where nothing says what the Python that is offered would begin with: in a cell of the magic, and anywhere else. */
export const NAMELESS = "give the capture a name, with `c = …` or as `%%tracefuse -o c`";

/** How a number is known: its mark, and what that means. @type {Record<TimeKind, [glyph: string, meaning: string]>} */
export const KINDS = {
  measured: ["●", "timed on this device"],
  predicted: ["◍", "not timed yet: measured times of what did not change, the rest modelled and calibrated by them"],
  modelled: ["≈", "the least time that the bytes and the arithmetic take, no launch counted: nothing was timed"],
};

/** @param {TimeKind | ""} kind */
export function kindMark(kind) {
  return kind === "" ? null : h("abbr", { class: `tf-from tf-from-${kind}`, title: KINDS[kind][1] }, h("span", { "aria-hidden": "true" }, KINDS[kind][0]), ` ${kind}`);
}

/** A value's name that selects it. @param {string} value @param {Act} act */
export function chip(value, act) {
  return h("button", { class: "tf-chip", onclick: () => act.select(value) }, value);
}

/** A word that is not everybody's, with what it means. @param {string} word @param {string} meaning */
export function term(word, meaning) {
  return h("abbr", { class: "tf-term", title: meaning }, word);
}

/** A button that copies a text. @param {string} text @param {string} [more] classes @param {string} [label] */
export function copyButton(text, more = "", label = "copy") {
  const button = h("button", { class: `tf-chip ${more}`, title: `copy: ${text}` }, label);
  button.onclick = async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "copied";
    } catch {
      // A page without clipboard permission, such as file:// in some browsers.
      button.textContent = "select the text and press Ctrl+C";
    }
    setTimeout(() => (button.textContent = label), 1500);
  };
  return button;
}

/** A fix as it is pasted: its code, else all of its words. @param {Finding} finding */
export function codeOf({ code, fix }) {
  return code || plain(fix);
}

/** One unit for all times of a table. @param {import("./modules.js").Sums} total */
export function unitOf(total) {
  const us = Math.max(time(total, 0), time(total));
  return us >= 1000 ? { name: "ms", us: 1000 } : us >= 1 || us === 0 ? { name: "µs", us: 1 } : { name: "ns", us: 1e-3 };
}

/** A time as a figure in the unit of its table; below a nanosecond no model tells times apart. @param {number} us @param {{ us: number }} unit */
export function inUnit(us, unit) {
  return us > 0 && us < 1e-3 && unit.us <= 1 ? `<${1e-3 / unit.us}` : figure(us / unit.us);
}

/** A share with as many digits as can be told apart: "12 %", "1.2 %". @param {number} part @param {number} whole */
export function percent(part, whole) {
  if (!part || !whole) return "";
  const share = (100 * part) / whole;
  return share < 0.1 ? "<0.1 %" : `${share < 9.95 ? share.toFixed(1) : Math.round(share)} %`;
}

/** Optimised over what it was timed against, or that nothing can be said of it; a colour only where its kernels ran. @param {TimingRow} row @param {Payload} payload */
export function ratio(row, { timing, runs_triton: runsTriton, kernels }) {
  if (!row.ratio) return h("span", { class: "tf-note" }, row.verdict);
  const { median, low, high, samples } = row.ratio;
  const spread = bounds(row.ratio, (one) => one.toFixed(2));
  const isPinned = timing?.is_pinned;
  const isJudged = runsTriton || kernels.length === 0;
  const isSeen = row.verdict === "faster" || row.verdict === "slower";
  const mood = isSeen && isJudged ? (row.verdict === "faster" ? "better" : "worse") : null;
  const ofMedians = row.variant_ms && row.baseline_ms ? row.variant_ms.median / row.baseline_ms.median : median;
  const drifted = samples > 1 && (ofMedians < low || ofMedians > high);
  const within = drifted ? ". Times drifted: those shown are medians of all rounds, the ratio compares within each round" : "";
  const title = `${row.program} / ${isPinned ? "pinned" : "captured"}: ${median.toFixed(2)}; 99 % interval: ${spread}${within}`;
  const text = isSeen ? `${median.toFixed(2)}× ${drifted ? "by round" : "the time"}` : row.verdict;
  return h("span", { class: `tf-pill tf-${mood ?? "same"}`, title }, text, samples > 1 && h("small", null, ` ${spread}`));
}
