// The details of the selected value: what is known of it, where each number comes from, and in words why a number is missing.

import { bandwidth, resources, sourceBlock } from "../kernels/facts.js";
import { formatBytes, formatTime, h } from "../parts/dom.js";
import { chip, NOT_HELD, percent } from "../parts/widgets.js";
import { decisionsOn, passWork } from "../passes/decisions.js";
import { frozen, frozenBy, hasGradient, parameterOf, pinned, pinOf } from "../passes/pins.js";

const SHOWN = 12;
const HINT = "Click a value for more on it.";

/** @param {View} view @param {boolean} showsPass of a pass and a value, which one @param {Open} open @param {Act} act */
export function details(view, showsPass, open, act) {
  const { payload, selected, pass } = view;
  const value = payload.values[selected];
  const work = payload.passes.find((one) => one.name === pass);
  const attributes = { class: "tf-details", "data-testid": "tf-details", "aria-live": "polite" };
  // Beside two texts the strip above them says what a pass did: they have the room.
  const empty = { ...attributes, class: "tf-details tf-empty" };
  if (work && (showsPass || !value)) return h("div", empty, passWork(work, view, act));
  const stepped = inStep(view);
  if (!selected) return h("div", { ...empty, class: "tf-details tf-empty tf-hint" }, next(payload), h("span", null, HINT));
  if (!value) return h("div", attributes, h("div", { class: "tf-facts" }, h("b", { class: "tf-name" }, selected), clear(pass, act)), ...stepped, why(`${selected} is in neither trace with these passes${stepped.length > 0 ? ": another pass made it, or took it away" : ""}.`));
  return h(
    "div",
    attributes,
    head(selected, value, pass, act),
    ...stepped,
    stepped.length > 0 && h("h4", null, "With all passes"),
    ...lines(value),
    value.module && fact("module", h("code", null, `${value.module}: ${value.module_type}`)),
    ...time(selected, payload, view.live),
    ...memory(value, act),
    savedFor(selected, payload),
    ...kernel(value, view, open, act),
    parameter(selected, payload, act),
    pins(selected, value, payload.config, act),
    chips("reads", value.reads, act),
    chips("read by", value.uses, act),
    chips(value.phase === "forward" ? "backward twin" : "forward twin", value.twins, act),
    ...decisionsOn(selected, payload).map(([name, decision]) => fact(name, h("span", null, h("span", { class: "tf-action" }, decision.action), ` ${decision.reason}`))),
  );
}

/** What to do with what is shown, which is there already. @param {Payload} payload */
function next({ call, blocked }) {
  return call && !blocked && h("span", { title: call }, `Next: \`${call.replace(/\(.+\)$/, "(…)")}.compile()\` runs the step this way; Take away saves it. `);
}

/** What the step of the pipeline that the code is of says of the value, where the rest is of all passes. @param {View} view */
function inStep({ step, selected }) {
  if (!step || step.pass === "*") return [];
  const halves = [step.forward, step.backward, ...(step.update ? [step.update] : [])];
  const code = (/** @type {Line[]} */ lines) => lines.find(({ value, kind, diff }) => value === selected && kind === "op" && diff !== "-")?.code.trim().replaceAll("torch.ops.", "").replaceAll(".default(", "(");
  const [before, after] = [halves.flatMap((half) => half.before.map((line) => ({ ...line, diff: " " }))), halves.flatMap(({ lines }) => lines)].map((lines) => code(/** @type {Line[]} */ (lines)));
  if (!before && !after) return [];
  const said = (/** @type {string | undefined} */ text, /** @type {string} */ none) => (text ? h("code", { class: "tf-source" }, text) : why(none));
  if (before === after) return [fact(`in ${step.pass}`, said(before, ""), why("left as it was"))];
  return [fact(`before ${step.pass}`, said(before, "not there")), fact(`after ${step.pass}`, said(after, "taken away"))];
}

/** Its line; of a kernel that does the work of several all of them, each with its part. @param {Value} value */
function lines({ source, lines: shared }) {
  if (shared.length === 0) return [source && fact("line", h("code", { class: "tf-source" }, source))];
  const each = shared.map(([text, share]) => h("li", null, h("code", { class: "tf-source" }, text || "no line of the program"), why(` ${percent(share, 1)}`)));
  return [fact("lines", h("span", null, "one kernel for all of these; each has its part of the time by the model", h("ul", { class: "tf-lines-of", "data-testid": "tf-details-lines" }, each)))];
}

/** @param {string} name @param {Value} value @param {string} pass @param {Act} act */
function head(name, value, pass, act) {
  return h(
    "div",
    { class: "tf-facts" },
    h("b", { class: "tf-name" }, name),
    clear(pass, act),
    h("code", { class: "tf-wide" }, value.type),
    h("span", { class: "tf-wide" }, value.op === "placeholder" ? "input" : value.op, h("span", { class: "tf-note" }, ` ${value.phase}`)),
    value.saved_bytes > 0 && h("span", { class: "tf-badge" }, "saved for backward"),
    value.removed && h("span", { class: "tf-badge tf-removed" }, "− removed by a pass"),
  );
}

/** @param {string} pass @param {Act} act */
function clear(pass, act) {
  return h("button", { class: "tf-chip tf-close", "aria-label": "clear the selection", title: pass ? `back to what ${pass} did` : "clear the selection", onclick: () => act.select(""), "data-testid": "tf-clear" }, "×");
}

/** @param {string} label @param {...(Node | string | null | false)} content */
function fact(label, ...content) {
  return h("div", { class: "tf-fact" }, h("span", { class: "tf-label" }, label), h("span", { class: "tf-chips" }, ...content));
}

/** @param {string} label @param {string[]} names @param {Act} act */
function chips(label, names, act) {
  if (names.length === 0) return null;
  const more = names.length - SHOWN;
  return fact(label, ...names.slice(0, SHOWN).map((name) => chip(name, act)), more > 0 && h("span", { class: "tf-note" }, `+${more}`));
}

/** @param {string} text */
function why(text) {
  return h("span", { class: "tf-note" }, text);
}

// --- time and memory -------------------------------------------------------------------------------------------------

/** @param {string} name @param {Payload} payload @param {boolean} live */
function time(name, { values, times, baseline }, live) {
  const [before, after] = values[name].time_us;
  const was = before !== null && fact("time before", h("span", null, formatTime(before)), why(`${times.before}${baseline.is_pinned ? "; pinned" : ""}`));
  if (after !== null) return [before !== after && was, fact("time", h("b", null, formatTime(after)), why(times.after))];
  return [was, fact("time", why(noTime(name, values, times.after, live)))];
}

/** @param {string} name @param {Record<string, Value>} values @param {string} provenance @param {boolean} live */
function noTime(name, values, provenance, live) {
  const value = values[name];
  if (value.removed) return "none: a pass removed it";
  if (value.op === "placeholder") return "none: it is an input";
  if (value.op === "getitem") return `none of its own: it is a part of ${value.reads[0]}`;
  if (!/^(measured|modelled)/.test(provenance)) return live ? "not measured: press Measure" : "not measured when this page was saved";
  return "none: a view runs nothing";
}

/** @param {Value} value @param {Act} act */
function memory(value, act) {
  const stride = value.stride && value.stride.length > 0 && fact("stride", h("code", null, `(${value.stride.join(", ")})`));
  const size = value.nbytes > 0 ? h("span", null, formatBytes(value.nbytes)) : why("none of its own");
  return [fact("bytes", size), stride, chips("same memory", value.storage, act)];
}

/** Why the backward needs it. @param {string} name @param {Payload} payload */
function savedFor(name, { memory: { why: reasonOf, reasons } }) {
  const reason = reasonOf[name];
  const row = reasons.find(([one]) => one === reason);
  return row ? fact("saved: why", h("b", null, reason), why(row[3])) : null;
}

// --- kernel ----------------------------------------------------------------------------------------------------------

/** @param {Value} value @param {View} view @param {Open} open @param {Act} act */
function kernel(value, view, open, act) {
  const record = view.payload.kernels.find((one) => one.name === value.kernel);
  if (!record) return [];
  const key = "source in details";
  const source = h("details", { class: "tf-more", open: open.kernels.has(key) }, h("summary", { "data-testid": "tf-details-source" }, "Triton source"));
  const fill = () => source.open && source.children.length === 1 && source.append(sourceBlock(record));
  source.ontoggle = () => {
    source.open ? open.kernels.add(key) : open.kernels.delete(key);
    fill();
  };
  fill();
  return [
    fact("kernel", h("button", { class: "tf-chip", title: "show it among the kernels", onclick: () => act.openKernel(record.name), "data-testid": "tf-details-kernel" }, record.name)),
    fact("its launch", record.time_us === null ? why(view.payload.runs_triton ? "not measured: press Measure" : "not measured: a CPU runs its ATen operators instead") : h("span", null, formatTime(record.time_us)), record.time_us !== null && why(record.provenance)),
    fact("bandwidth", bandwidth(record)),
    fact("per program", resources(record, view, act)),
    source,
  ];
}

// --- what can be asked of it -----------------------------------------------------------------------------------------

/** Freeze or train the parameter that this is, or is the gradient of. @param {string} name @param {Payload} payload @param {Act} act */
function parameter(name, { config, values }, act) {
  const of = parameterOf(name, values);
  if (!of) return null;
  const by = frozenBy(config.freeze, of);
  if (!by && !hasGradient(of, values)) return fact("parameter", h("code", null, of), why("has no gradient in this trace: frozen when it ran"));
  const changes = { freeze: frozen(config.freeze, of, !by) };
  return fact("parameter", h("code", null, of), choice(by ? "train" : "freeze", false, changes, "tf-freeze-one", act), why(by ? `frozen by “${by}”` : "trained"));
}

/** @param {string} name @param {Value} value @param {Config} config @param {Act} act */
function pins(name, value, config, act) {
  const isPart = value.op === "getitem" || (value.kernel !== "" && value.type.startsWith("("));
  if (value.phase !== "forward" || value.op === "placeholder" || (isPart && pinOf(config, name) === "auto")) return null;
  if (config.remat === null) return fact("remat", why("off: it decides nothing about this value"));
  const now = pinOf(config, name);
  const buttons = /** @type {const} */ (["auto", "save", "recompute"]).map((pin) => choice(pin, pin === now, pinned(config, name, pin), `tf-pin-${pin}`, act));
  return fact("for backward", h("span", { class: "tf-choice", role: "group", "aria-label": `what remat does with ${name}` }, buttons));
}

/** @param {string} label @param {boolean} isPressed @param {Partial<Config>} changes @param {string} id @param {Act} act */
function choice(label, isPressed, changes, id, act) {
  const isHeld = isPressed || act.holds(changes);
  const ask = () => isPressed || act.configure(changes);
  return h("button", { class: "tf-chip", "aria-pressed": String(isPressed), disabled: !isHeld, title: isHeld ? null : NOT_HELD, onclick: ask, "data-testid": id }, label);
}
