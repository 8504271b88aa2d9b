// The passes column: a switch for each pass, the user's own too, its options, what it changed, and why.

import { formatBytes, formatSeconds, h, plural, signed } from "./dom.js";
import { options } from "./options.js";

const DEFAULT_WEIGHT = 0.5;
const SHOWN_VALUES = 8;
const SHOWN_REASONS = 40;

/** @param {Payload} payload @param {Status} status @param {Open} open @param {Act} act */
export function passes(payload, status, open, act) {
  const error = status.error?.panel === "passes" ? status.error : null;
  const isOfRow = payload.passes.some((one) => one.name === error?.at);
  return h(
    "section",
    { class: "tf-passes", "aria-label": "Passes", "aria-busy": String(status.busy === "passes") },
    h("h3", null, "Passes"),
    payload.passes.map((one) => row(one, payload, open, act, error?.at === one.name ? error.message : null)),
    error && !isOfRow && alert(error.message),
    callLine(payload.call),
  );
}

/** @param {string} message */
function alert(message) {
  return h("p", { class: "tf-error", role: "alert", "data-testid": "tf-error-passes" }, message);
}

/** @param {PassRecord} one @param {Payload} payload @param {Open} open @param {Act} act @param {string | null} problem what the control answered */
function row(one, payload, open, act, problem) {
  const id = `tf-${one.name}-${Math.random().toString(36).slice(2, 8)}`;
  return h(
    "div",
    { class: `tf-pass${one.enabled ? "" : " tf-off"}`, "data-testid": `tf-pass-${one.name}` },
    h(
      "div",
      { class: "tf-pass-head" },
      h("input", {
        type: "checkbox",
        role: "switch",
        id,
        class: "tf-switch",
        checked: one.enabled,
        disabled: !one.enabled && one.state !== "off",
        onchange: () => act.configure({ [one.name]: switched(one) }),
        "data-testid": `tf-toggle-${one.name}`,
      }),
      h("label", { for: id, title: one.help }, one.name),
      one.seconds !== null && h("span", { class: "tf-note tf-seconds", title: "how long the pass itself took, not the program" }, `took ${formatSeconds(one.seconds)}`),
    ),
    ...(one.enabled ? options(one, payload, open, act) : []),
    problem && alert(problem),
    h("div", { class: "tf-effect" }, effect(one)),
    one.error && h("p", { class: "tf-error", role: "alert" }, one.error),
    one.enabled && one.decisions.length > 0 && reasons(one, payload, open.passes, act),
  );
}

/** What the switch sends: a pass with an option goes on with its default. @param {PassRecord} one */
function switched(one) {
  if (one.name === "freeze") return one.enabled ? null : [];
  if (one.name === "remat") return one.enabled ? null : DEFAULT_WEIGHT;
  return !one.enabled;
}

/** @param {PassRecord} one */
function effect(one) {
  if (!one.enabled) return [h("span", { class: "tf-note" }, one.state)];
  if (!one.ops || !one.saved_bytes) return [];
  const ops = one.ops[1] - one.ops[0];
  const saved = one.saved_bytes[1] - one.saved_bytes[0];
  if (ops === 0 && saved === 0) return [h("span", { class: "tf-note" }, "same size")];
  return [
    ops !== 0 && h("span", { class: ops < 0 ? "tf-gain" : "tf-cost" }, `${signed(ops)} ops`),
    saved !== 0 && h("span", { class: saved < 0 ? "tf-gain" : "tf-cost" }, `keeps ${formatBytes(Math.abs(saved))} ${saved < 0 ? "less" : "more"} for backward`),
  ].filter((part) => part !== false);
}

/** @param {PassRecord} one @param {Payload} payload @param {Set<string>} open @param {Act} act */
function reasons(one, payload, open, act) {
  const shown = one.decisions.slice(0, SHOWN_REASONS);
  const left = one.decisions.length - shown.length;
  const total = one.decisions.reduce((sum, decision) => sum + decision.values.length, 0);
  return h(
    "details",
    {
      class: "tf-reasons",
      open: open.has(one.name),
      ontoggle: (/** @type {any} */ e) => (e.target.open ? open.add(one.name) : open.delete(one.name)),
    },
    h("summary", { "data-testid": `tf-reasons-${one.name}` }, plural(total, "decision")),
    h("ul", null, shown.map((decision) => reason(decision, act))),
    left > 0 && h("p", { class: "tf-note" }, `and ${plural(left, "more reason")}: ${printing(one, payload)}`),
  );
}

/** What prints all decisions of a pass. @param {PassRecord} one @param {Payload} payload */
function printing({ name }, { call, passes }) {
  if (!call) return "re-run with `-o c` to print them";
  const place = passes.filter((one) => one.enabled).findIndex((one) => one.name === name);
  return `\`print(${call}.steps[${place}])\` has all`;
}

/** @param {Decision} decision @param {Act} act */
function reason(decision, act) {
  const more = decision.values.length - SHOWN_VALUES;
  return h(
    "li",
    null,
    h("span", { class: "tf-action" }, decision.action, decision.values.length > 1 && ` × ${decision.values.length}`),
    decision.nbytes > 0 && h("span", { class: "tf-note" }, ` ${formatBytes(decision.nbytes)}`),
    h("span", { class: "tf-why" }, decision.reason),
    h("span", { class: "tf-chips" }, decision.values.slice(0, SHOWN_VALUES).map((v) => chip(v, act)), more > 0 && h("span", { class: "tf-note" }, `+${more}`)),
  );
}

/** A value's name that selects it. @param {string} value @param {Act} act */
export function chip(value, act) {
  return h("button", { class: "tf-chip", onclick: () => act.select(value) }, value);
}

/** @param {string} call */
function callLine(call) {
  if (!call) return h("p", { class: "tf-note", "data-testid": "tf-call" }, "re-run with ", h("code", null, "-o c"), " to use it in Python");
  const button = h("button", { class: "tf-chip", title: "copy" }, "copy");
  button.onclick = () => copy(call, button);
  return h("div", { class: "tf-call" }, h("span", { class: "tf-label" }, "In Python"), h("code", { "data-testid": "tf-call" }, call), button);
}

/** @param {string} text @param {HTMLButtonElement} button */
export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
  } catch {
    // A page without clipboard permission, such as file:// in some browsers.
    button.textContent = "select the text and press Ctrl+C";
  }
  setTimeout(() => (button.textContent = "copy"), 1500);
}
