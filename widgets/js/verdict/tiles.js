// The six figures of the verdict: each a label, a figure before and after, and what that change is. Their places never change.

import { figure, formatChange, formatTime, h, paired, plural, sizes, spans } from "../parts/dom.js";
import { KINDS, ratio, term } from "../parts/widgets.js";

/** @param {Payload} payload @param {boolean} live */
export function tiles(payload, live) {
  const { ops, saved_bytes: saved } = payload.summary;
  const hasBackward = payload.backward.ops[0] + payload.backward.ops[1] > 0;
  const time = timeTile(payload, live);
  const savedLabel = [term("Saved for backward", "bytes that the forward keeps until the backward has read them")];
  const others = [
    peakTile(payload),
    hasBackward ? tile("saved", savedLabel, sizesOf(saved), pill(saved, payload.blocked)) : tile("saved", savedLabel, [h("span", { class: "tf-was" }, "no backward")], null),
    tile("ops", [term("Operators", "operators that do work; views and parts of results are not counted")], pair([String(ops[0]), String(ops[1])]), opsBelow(payload)),
  ];
  const rest = [kernelTile(payload), differenceTile(payload)];
  // What a CPU can know stands first where there is no GPU.
  return payload.runs_triton ? [time, ...others, ...rest] : [...others, time, ...rest];
}

/** @param {string} id @param {(Node | string)[]} label @param {(Node | string)[]} figures @param {Node | null} below @param {string} [flag] */
function tile(id, label, figures, below, flag) {
  return h(
    "div",
    { class: `tf-tile${flag ? ` tf-${flag}` : ""}`, "data-testid": `tf-tile-${id}` },
    h("span", { class: "tf-label" }, label),
    h("span", { class: "tf-figure" }, figures),
    h("span", { class: "tf-below" }, below),
  );
}

const GLYPHS = { measured: KINDS.measured[0], predicted: KINDS.predicted[0], modelled: KINDS.modelled[0], static: "≈" };

/** Where a figure comes from. @param {keyof typeof GLYPHS} kind @param {string} title */
function origin(kind, title) {
  return h("abbr", { class: `tf-from tf-from-${kind}`, title }, h("span", { "aria-hidden": "true" }, GLYPHS[kind]), ` ${kind}`);
}

/** @param {[string, string]} texts @param {string} [unit] */
function pair([before, after], unit = "") {
  const end = unit ? [h("span", { class: "tf-unit" }, unit)] : [];
  if (before === after) return [h("b", null, after), ...end];
  return [h("span", { class: "tf-was" }, before), h("span", { class: "tf-arrow", role: "img", "aria-label": "to" }, "→"), h("b", null, after), ...end];
}

/** @param {[number, number]} bytes */
function sizesOf(bytes) {
  return pair(...paired(bytes, sizes));
}

/** @param {string} text @param {string} [title] */
function note(text, title = text) {
  return h("span", { class: "tf-note", title }, text);
}

/** No verdict on a program that cannot be checked. @param {[number, number]} pair @param {string | null} blocked */
function pill([before, after], blocked) {
  const change = formatChange(before, after);
  const mood = blocked || change.startsWith("±") || before === after ? "same" : after < before ? "better" : "worse";
  return h("span", { class: `tf-pill tf-${mood}` }, change || "nothing to compare");
}

/** The step by the one clock. @param {Payload} payload @param {boolean} live */
function timeTile(payload, live) {
  const { clock, timing, blocked } = payload;
  const kind = clock.kinds[1];
  const [texts, unit] = paired(clock.takes_us, spans);
  const row = timing?.rows.find((one) => one.label === "step") ?? timing?.rows.at(-1);
  const isTimed = kind === "measured" && clock.kinds[0] === "measured" && timing && !timing.stale && row;
  const [ran, of] = paired(clock.step_us, spans);
  const below = isTimed ? ratio(row, payload) : clock.launches ? note(`kernels ${ran.join(" → ")} ${of}`, `the step takes what launching its kernels takes; ${payload.sentence.head}`) : kind === "modelled" ? note(`at least, on ${clock.device}`, clock.provenance[1]) : pill(clock.takes_us, blocked);
  const remedy = kind === "measured" || blocked || !live ? "" : "; press Measure to time it";
  return tile("time", ["Step ", origin(/** @type {keyof typeof GLYPHS} */ (kind), `${meaning(clock)}${remedy}. ${clock.provenance[1]}`)], pair(texts, unit), below, kind);
}

/** How the step's figure is known: launches are counted where a modelled step waits for them. @param {Pick<Clock, "kinds" | "launches">} clock */
export function meaning({ kinds, launches }) {
  return launches ? "what launching its kernels one by one takes: nothing was timed" : KINDS[kinds[1]][1];
}

/** How many launches they are, where these are what counts; and the change. @param {Payload} payload */
function opsBelow({ summary: { ops }, clock: { launches }, blocked }) {
  if (!launches) return pill(ops, blocked);
  if (launches.join() === ops.join()) return h("span", null, pill(ops, blocked), note(" a launch each"));
  return note(`in ${launches.join(" → ")} launches`, "A GPU makes an optimizer's update list by list");
}

/** @param {Payload} payload */
function kernelTile({ summary: { kernels }, runs_triton: runsTriton, timing, clock: { chosen } }) {
  const count = `in ${plural(kernels.launches, "launch", "launches")}`;
  const notRun = timing && !runsTriton ? "Triton kernels did not run: a CPU runs ATen operators" : "";
  const below = note(notRun && chosen === "here" ? "not run: CPU" : count, `${count}. ${notRun}`);
  return tile("kernels", [term("Triton kernels", "each computes ops that read and write memory once, together")], [h("b", null, kernels.unique)], kernels.unique > 0 ? below : null);
}

/** @param {Payload} payload */
function peakTile(payload) {
  const { summary, blocked } = payload;
  const { peak_bytes: planned, measured_peak_bytes: measured } = summary;
  const bytes = measured ?? planned;
  const [texts, unit] = paired(planned, sizes);
  const badge = measured
    ? origin("measured", `The most bytes alive at once, inputs and parameters included, by the GPU's allocator; static: ${texts.join(" → ")} ${unit}`)
    : origin("static", "The most bytes alive at once, inputs and parameters included, as the trace says");
  const whole = payload.update ? ": with the update, and with what the optimizer keeps" : "";
  const by = bytes[1] > bytes[0] && culprit(payload);
  const canTry = planned[1] > summary.least_peak && payload.passes.some((one) => one.name === "remat" && one.changed);
  const below = h("span", null, pill(bytes, blocked), by && note(` by ${by}`, `without ${by} the peak is lowest${canTry ? "; a budget on it, in Timeline, may lower it" : ""}`));
  return tile("peak", [term("Peak memory", `the most bytes alive at once in the step${whole}`), " ", badge], sizesOf(bytes), below);
}

/** The pass that raises the peak most, once that is known; null of none. @param {Payload} payload */
function culprit({ passes, summary }) {
  const peaks = passes.filter(({ without }) => without).map(({ name, without }) => ({ name, peak: without?.peak_bytes ?? 0 }));
  const [lowest] = peaks.sort((a, b) => a.peak - b.peak);
  return lowest && lowest.peak < summary.peak_bytes[1] ? lowest.name : null;
}

/** @param {Payload} payload */
function differenceTile({ summary: { difference }, runs_triton: runsTriton }) {
  const label = [term("Results vs eager", "whether a replay gives the results and gradients of the program as it ran")];
  if (!difference) return tile("difference", label, [h("span", { class: "tf-was" }, "not measured")], null);
  const { is_same: isSame, delta, brief, said } = difference;
  const title = runsTriton ? said : `Compared are ATen operators on this CPU, and no Triton kernel. ${said}`;
  const number = h("span", { class: "tf-unit", title }, runsTriton || isSame === null ? delta > 0 && small(delta) : "on CPU");
  return tile("difference", label, [h("b", null, isSame === null ? "differ by" : isSame ? "same" : "unsure"), number], h("span", { class: isSame === false ? "tf-pill tf-worse" : "tf-note", title }, brief));
}

/** @param {number} number */
function small(number) {
  return number === 0 ? "0" : number.toExponential(1).replace("-", "−");
}

/** What the step took on the CPU, which is no verdict on a GPU's, and what to know of that; null where it was not measured. @param {Payload} payload @returns {[string, string] | null} */
export function ownTime({ runs_triton: runsTriton, timing, clock }) {
  const row = timing?.rows.find((one) => one.label === "step") ?? timing?.rows.at(-1);
  if (runsTriton || clock.chosen === "here" || !timing || !row?.baseline_ms) return null;
  const took = figure(row.baseline_ms.median);
  if (!row.variant_ms || timing.stale) return [`${took} ms`, " a step"];
  const few = row.verdict.match(/\d+ of \d+/);
  if (few) return [`${few} rounds`, ": press Measure again"];
  const isSeen = row.verdict === "faster" || row.verdict === "slower";
  if (!isSeen) return [`${took} ms`, ` a step; with the passes: ${row.verdict}`];
  return [`${took} → ${figure(row.variant_ms.median)} ms`, ` a step with the passes${row.verdict === "slower" ? ", whose kernels need a GPU" : ""}`];
}
