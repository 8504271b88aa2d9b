// The verdict bar: what the passes bought, in six figures, what these are compared with, and what measures them.

import { bounds, figure, formatBytes, formatChange, h, plural } from "../parts/dom.js";
import { NEEDS_KERNEL, ratio } from "../parts/widgets.js";
import { TakeAwayMenu } from "./takeaway.js";

export class VerdictBar {
  /** @param {Act} act */
  constructor(act) {
    this.tiles = h("div", { class: "tf-tiles" });
    this.measure = button("Measure", "tf-measure", act.measure);
    this.ablate = button("Measure each pass", "tf-ablate", () => act.ask("timing", { type: "ablate" }));
    this.cancel = button("Cancel", "tf-cancel", () => {
      this.text.textContent = "cancelling…";
      act.ask("timing", { type: "cancel" });
    });
    this.pin = button("", "tf-pin", () => act.ask("passes", { type: this.isPinned ? "unpin" : "pin" }));
    this.isPinned = false;
    this.progress = h("progress", { max: 1, "aria-label": "progress" });
    this.text = h("span", { class: "tf-note", role: "status" });
    this.running = h("div", { class: "tf-running" }, this.progress, this.text);
    this.menu = new TakeAwayMenu(act);
    const actions = h("div", { class: "tf-actions" }, this.measure, this.ablate, this.running, this.cancel, this.pin, this.menu.element);
    this.lines = h("div", { class: "tf-verdict-lines" });
    this.element = h("header", { class: "tf-verdict", "data-testid": "tf-verdict" }, h("div", { class: "tf-verdict-row" }, this.tiles, actions), this.lines, this.menu.notice);
  }

  /** @param {View} view */
  draw(view) {
    const { payload, status, live } = view;
    this.tiles.replaceChildren(...tiles(payload, live));
    this.lines.replaceChildren(...lines(payload));
    this.drawActions(payload, status, live);
    this.menu.draw(view);
  }

  /** @param {Payload} payload @param {Status} status @param {boolean} live */
  drawActions({ timing, blocked, baseline }, status, live) {
    const isRunning = status.busy === "timing" || status.busy === "findings";
    const reason = !live ? NEEDS_KERNEL : blocked;
    this.measure.textContent = timing ? "Measure again" : "Measure";
    this.measure.classList.toggle("tf-primary", !timing || timing.stale);
    enable(this.measure, reason, status.busy !== "" && !isRunning, "replays the recorded traces, before and after the passes, in turn; your code is not run again");
    enable(this.ablate, reason, status.busy !== "" && !isRunning, "times the program without each pass in turn: what each one alone adds to the step");
    this.isPinned = baseline.is_pinned;
    this.pin.textContent = baseline.is_pinned ? "Unpin" : "Pin as baseline";
    enable(this.pin, live ? null : NEEDS_KERNEL, status.busy !== "", baseline.is_pinned ? `compare with the trace as captured again, not with ${baseline.call}` : "compare from now on with what is shown now");
    this.showRunning(isRunning, status);
  }

  /** While something is measured, Cancel stands where Measure does, and has its focus. @param {boolean} isRunning @param {Status} status */
  showRunning(isRunning, status) {
    const [shown, hidden] = isRunning ? [[this.running, this.cancel], [this.measure, this.ablate]] : [[this.measure, this.ablate], [this.running, this.cancel]];
    const hadFocus = hidden.some((one) => one === document.activeElement);
    for (const one of shown) one.hidden = false;
    if (hadFocus) (isRunning ? this.cancel : this.measure).focus({ preventScroll: true });
    for (const one of hidden) one.hidden = true;
    if (!isRunning) return;
    if (status.progress === null) this.progress.removeAttribute("value");
    else this.progress.value = status.progress;
    this.text.textContent = status.text || "measuring…";
    this.text.title = status.text;
  }
}

/** @param {string} label @param {string} id @param {() => void} act */
function button(label, id, act) {
  return h("button", { class: "tf-button", onclick: act, "data-testid": id }, label);
}

/** @param {HTMLButtonElement} button @param {string | null} reason why it cannot be used at all @param {boolean} isBusy @param {string} help */
function enable(button, reason, isBusy, help) {
  button.disabled = reason !== null || isBusy;
  button.title = reason ?? help;
}

// --- the figures -----------------------------------------------------------------------------------------------------

/** @param {Payload} payload @param {boolean} live */
function tiles(payload, live) {
  const { ops, saved_bytes: saved } = payload.summary;
  return [
    timeTile(payload, live),
    peakTile(payload),
    payload.backward.ops[0] + payload.backward.ops[1] > 0 ? tile("saved", "Saved for backward", null, sizes(saved), pill(saved, payload.blocked)) : tile("saved", "Saved for backward", null, [h("span", { class: "tf-was" }, "no backward")], null),
    tile("ops", "Operators", null, pair(ops[0], ops[1]), pill(ops, payload.blocked)),
    kernelTile(payload),
    differenceTile(payload),
  ];
}

/** @param {string} id @param {string} label @param {Node | null} badge @param {(Node | string)[]} figures @param {Node | null} below @param {string} [flag] */
function tile(id, label, badge, figures, below, flag) {
  return h(
    "div",
    { class: `tf-tile${flag ? ` tf-${flag}` : ""}`, "data-testid": `tf-tile-${id}` },
    h("span", { class: "tf-label" }, label, badge),
    h("span", { class: "tf-figure" }, figures),
    below,
  );
}

const GLYPHS = { measured: "●", stale: "◔", static: "≡" };

/** Where a figure comes from. @param {keyof typeof GLYPHS} kind @param {string} text @param {string} title */
function provenance(kind, text, title) {
  return h("span", { class: `tf-from tf-from-${kind}`, title }, h("span", { "aria-hidden": "true" }, GLYPHS[kind]), ` ${text}`);
}

/** @param {string | number} before @param {string | number} after */
function pair(before, after) {
  if (before === after) return [h("b", null, after)];
  return [h("span", { class: "tf-was" }, before), h("span", { class: "tf-arrow", role: "img", "aria-label": "to" }, "→"), h("b", null, after)];
}

/** @param {[number, number]} bytes */
function sizes([before, after]) {
  return pair(formatBytes(before), formatBytes(after));
}

/** @param {string} text @param {string} [title] */
function note(text, title) {
  return h("span", { class: "tf-note", title }, text);
}

/** No verdict on a program that cannot be checked. @param {[number, number]} pair @param {string | null} blocked */
function pill([before, after], blocked) {
  const change = formatChange(before, after);
  const mood = blocked || change.startsWith("±") || before === after ? "same" : after < before ? "better" : "worse";
  return h("span", { class: `tf-pill tf-${mood}` }, change || "nothing to compare");
}

const UNKNOWN = () => [h("span", { class: "tf-was" }, "not measured")];

/** @param {Payload} payload @param {boolean} live */
function timeTile(payload, live) {
  const { timing, blocked } = payload;
  const step = timing?.rows.find((row) => row.label === "step") ?? timing?.rows.at(-1);
  const remedy = note(blocked ? "cannot be measured" : live ? "press Measure" : "saved without it");
  if (!timing || !step) return tile("time", "Step time", null, UNKNOWN(), remedy);
  const before = step.baseline_ms ? [h("span", { class: "tf-was" }, figure(step.baseline_ms.median)), h("span", { class: "tf-arrow" }, "→")] : [];
  if (!step.variant_ms) return tile("time", "Step time", provenance("measured", "measured", `what is pinned, in ms: ${timing.provenance}`), [...before, ...UNKNOWN()], remedy);
  const figures = [...before, h("b", null, figure(step.variant_ms.median)), h("span", { class: "tf-unit" }, "ms")];
  const stale = live ? "of other passes: measure again" : "of other passes: run the cell in a notebook to measure these passes";
  const below = timing.stale ? note(stale, stale) : ratio(step, payload);
  const badge = timing.stale ? provenance("stale", "stale", `times of ${timing.config}; ${timing.provenance}`) : provenance("measured", "measured", timing.provenance);
  return tile("time", "Step time", badge, figures, below, timing.stale ? "stale" : "");
}

/** @param {Payload} payload */
function kernelTile({ summary: { kernels }, runs_triton: runsTriton, timing }) {
  const launches = plural(kernels.launches, "launch", "launches");
  const below = timing && !runsTriton ? note("unique · not run: CPU", `${launches}; Triton kernels did not run: a CPU runs their ATen operators`) : note(`unique · ${launches}`);
  return tile("kernels", "Triton kernels", null, [h("b", null, kernels.unique)], kernels.unique > 0 ? below : null);
}

/** @param {Payload} payload */
function peakTile({ summary, blocked }) {
  const { peak_bytes: planned, measured_peak_bytes: measured } = summary;
  const bytes = measured ?? planned;
  const badge = measured
    ? provenance("measured", "measured", `The most bytes alive at once, inputs and parameters included, by the GPU's allocator; static: ${formatBytes(planned[0])} → ${formatBytes(planned[1])}`)
    : provenance("static", "static", "The most bytes alive at once, inputs and parameters included, as the trace says; no GPU's allocator was asked");
  return tile("peak", "Peak memory", badge, sizes(bytes), pill(bytes, blocked));
}

/** @param {Payload} payload */
function differenceTile({ summary: { difference } }) {
  if (!difference) return tile("difference", "Max |Δ| to eager", null, UNKNOWN(), null);
  const { results, gradients, updated } = difference;
  const below = note(results > gradients ? `gradients ${small(gradients)}` : `results ${small(results)}`, `of results ${results}, of gradients ${gradients}`);
  return tile("difference", "Max |Δ| to eager", null, [h("b", null, small(Math.max(results, gradients, updated ?? 0)))], below);
}

/** @param {number} number */
function small(number) {
  return number === 0 ? "0" : number.toExponential(1).replace("-", "−");
}

/** Which step of a loop it is, what the figures are against, if not the capture, and what stands in the way of measuring. @param {Payload} payload */
function lines({ steps, baseline, blocked }) {
  return [
    ...(steps ? [h("p", { class: "tf-note tf-steps", title: steps.each, "data-testid": "tf-steps" }, steps.said)] : []),
    ...(baseline.is_pinned ? [h("p", { class: "tf-baseline", "data-testid": "tf-baseline" }, "⚑ Every “before” is the pinned ", h("code", null, baseline.call))] : []),
    ...(blocked ? [h("p", { class: "tf-blocked", role: "status", "data-testid": "tf-blocked" }, blocked)] : []),
  ];
}
