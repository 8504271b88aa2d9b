// The verdict bar: what the passes bought, in four figures, what stands in the way, and the button that measures.

import { figure, formatBytes, formatChange, h, plural } from "./dom.js";

/** @param {Payload} payload @param {Status} status @param {boolean} live @param {() => void} measure */
export function verdict(payload, status, live, measure) {
  const { ops, saved_bytes: saved, kernels } = payload.summary;
  const launches = `unique · ${plural(kernels.launches, "launch", "launches")}`;
  return h(
    "header",
    { class: "tf-verdict", "data-testid": "tf-verdict" },
    timeTile(payload, live),
    tile("saved", "Saved for backward", pair(formatBytes(saved[0]), formatBytes(saved[1])), pill(saved[0], saved[1], payload.blocked)),
    tile("ops", "Operators", pair(ops[0], ops[1]), pill(ops[0], ops[1], payload.blocked)),
    tile("kernels", "Triton kernels", [h("b", null, kernels.unique)], kernels.unique > 0 ? note(launches) : null),
    measureButton(payload, status, live, measure),
    payload.blocked && h("p", { class: "tf-blocked", role: "status", "data-testid": "tf-blocked" }, payload.blocked),
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

/** No verdict on a program that cannot be checked. @param {number} before @param {number} after @param {string | null} blocked */
function pill(before, after, blocked) {
  const mood = blocked ? "same" : after < before ? "better" : after > before ? "worse" : "same";
  return h("span", { class: `tf-pill tf-${mood}` }, formatChange(before, after) || "nothing to compare");
}

/** @param {Payload} payload @param {boolean} live */
function timeTile({ timing, kernels, runs_triton: runsTriton }, live) {
  const step = timing?.rows.find((row) => row.label === "step") ?? timing?.rows.at(-1);
  if (!timing || !step?.variant_ms) return tile("time", "Step time", [h("span", { class: "tf-was" }, "not measured")], null);
  const before = step.baseline_ms ? [h("span", { class: "tf-was" }, figure(step.baseline_ms.median)), h("span", { class: "tf-arrow" }, "→")] : [];
  const figures = [...before, h("b", null, figure(step.variant_ms.median)), h("span", { class: "tf-unit" }, "ms")];
  const stale = live ? "of other passes: measure again" : "of other passes: run the cell in a notebook to measure these passes";
  const idle = !runsTriton && kernels.length > 0 && note("Triton kernels did not run: CPU");
  const below = h("span", { class: "tf-below" }, ratio(step), note(timing.stale ? stale : timing.provenance), idle);
  return tile("time", "Step time", figures, below, timing.stale ? "stale" : "");
}

/** Optimised over captured, or that nothing can be said of it. @param {TimingRow} row */
export function ratio(row) {
  const { median, low, high } = row.ratio;
  const mood = row.verdict === "faster" ? "better" : row.verdict === "slower" ? "worse" : null;
  const title = `optimised / captured: ${median.toFixed(2)}; 95 % interval ${low.toFixed(2)} to ${high.toFixed(2)}`;
  const text = mood ? `${median.toFixed(2)}× the time` : row.verdict;
  return h("span", { class: `tf-pill tf-${mood ?? "same"}`, title }, text, h("small", null, ` ${low.toFixed(2)}–${high.toFixed(2)}`));
}

/** @param {Payload} payload @param {Status} status @param {boolean} live @param {() => void} measure */
function measureButton({ timing, blocked }, status, live, measure) {
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
      { class: `tf-button${primary ? " tf-primary" : ""}`, onclick: measure, disabled: status.busy !== "" || blocked !== null, title: blocked, "data-testid": "tf-measure" },
      label,
    ),
    progress,
    running && h("span", { class: "tf-note" }, status.text),
  );
}
