// The verdict bar: what the passes bought, in four figures, and the button that measures.

import { figure, formatBytes, formatChange, h, plural } from "./dom.js";

/** @param {Payload} payload @param {Status} status @param {boolean} live @param {() => void} measure */
export function verdict(payload, status, live, measure) {
  const { ops, saved_bytes: saved, kernels } = payload.summary;
  return h(
    "header",
    { class: "tf-verdict", "data-testid": "tf-verdict" },
    timeTile(payload.timing),
    tile("saved", "Saved for backward", pair(formatBytes(saved[0]), formatBytes(saved[1])), pill(saved[0], saved[1])),
    tile("ops", "Operators", pair(ops[0], ops[1]), pill(ops[0], ops[1])),
    tile("kernels", "Triton kernels", [h("b", null, kernels.unique)], note(`unique · ${plural(kernels.launches, "launch", "launches")}`)),
    measureButton(payload.timing, status, live, measure),
  );
}

/** @param {string} id @param {string} label @param {(Node | string)[]} figures @param {Node | null} below @param {string} [flag] */
function tile(id, label, figures, below, flag) {
  return h(
    "div",
    { class: `tf-tile${flag ? ` tf-${flag}` : ""}`, "data-testid": `tf-tile-${id}` },
    h("span", { class: "tf-label" }, label),
    h("span", { class: "tf-figure" }, figures),
    below,
  );
}

/** @param {string | number} before @param {string | number} after */
function pair(before, after) {
  if (before === after) return [h("b", null, after)];
  return [h("span", { class: "tf-was" }, before), h("span", { class: "tf-arrow", "aria-label": "to" }, "→"), h("b", null, after)];
}

/** @param {string} text */
function note(text) {
  return h("span", { class: "tf-note" }, text);
}

/** @param {number} before @param {number} after */
function pill(before, after) {
  const mood = after < before ? "better" : after > before ? "worse" : "same";
  return h("span", { class: `tf-pill tf-${mood}` }, formatChange(before, after) || "nothing to compare");
}

/** @param {Timing | null} timing */
function timeTile(timing) {
  const step = timing?.rows.find((row) => row.label === "step") ?? timing?.rows.at(-1);
  if (!timing || !step?.variant_ms) return tile("time", "Step time", [h("span", { class: "tf-was" }, "not measured")], null);
  const before = step.baseline_ms ? [h("span", { class: "tf-was" }, figure(step.baseline_ms.median)), h("span", { class: "tf-arrow" }, "→")] : [];
  const figures = [...before, h("b", null, figure(step.variant_ms.median)), h("span", { class: "tf-unit" }, "ms")];
  const below = h("span", { class: "tf-below" }, speedup(step), note(timing.stale ? "of other passes: measure again" : timing.provenance));
  return tile("time", "Step time", figures, below, timing.stale ? "stale" : "");
}

/** @param {TimingRow} row */
export function speedup(row) {
  if (!row.ratio) return null;
  const { median, low, high } = row.ratio;
  const mood = low > 1 ? "better" : high < 1 ? "worse" : "same";
  const interval = `95 % interval ${low.toFixed(2)} to ${high.toFixed(2)}`;
  return h("span", { class: `tf-pill tf-${mood}`, title: interval }, `${median.toFixed(2)}×`, h("small", null, ` ${low.toFixed(2)}–${high.toFixed(2)}`));
}

/** @param {Timing | null} timing @param {Status} status @param {boolean} live @param {() => void} measure */
function measureButton(timing, status, live, measure) {
  if (!live) return h("span", { class: "tf-static", "data-testid": "tf-static" }, "saved page");
  const running = status.busy === "timing";
  const label = running ? "Measuring…" : timing ? "Measure again" : "Measure";
  const primary = !timing || timing.stale;
  const progress = running && h("progress", { max: 1, ...(status.progress === null ? {} : { value: status.progress }) });
  return h(
    "div",
    { class: "tf-measure" },
    h(
      "button",
      { class: `tf-button${primary ? " tf-primary" : ""}`, onclick: measure, disabled: status.busy !== "", "data-testid": "tf-measure" },
      label,
    ),
    progress,
    running && h("span", { class: "tf-note" }, status.text),
  );
}
