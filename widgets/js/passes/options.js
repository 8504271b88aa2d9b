// The options of the passes: a control for each that is used often; the others are folded under "options".

import { formatBytes, h } from "../parts/dom.js";
import { NOT_HELD, term } from "../parts/widgets.js";
import { pinned } from "./pins.js";

const WEIGHTS = /** @type {[number, string][]} */ ([[1, "1: full size"], [0.5, "½: half"], [0, "0: free"]]);
/** The slider's steps: 10 % to 100 %, then none at all: further right is more memory. */
const BUDGETS = [...Array.from({ length: 10 }, (_, step) => (step + 1) / 10), null];

/** The controls of one pass, on or off, each on a line of its own. @param {PassRecord} one @param {Payload} payload @param {Open} open @param {Act} act */
export function options(one, payload, open, act) {
  const { config } = payload;
  if (one.name === "freeze") {
    const named = (config.freeze ?? []).map((pattern) => ({ text: pattern, drop: { freeze: config.freeze?.filter((other) => other !== pattern) } }));
    return [freezeOption(one, config, open, act), pins("frozen", named, "nothing is frozen", suggestion(one, act), act)];
  }
  if (one.name !== "remat") return [];
  const inForceNow = [...config.save.map(inForce(config, "save")), ...config.recompute.map(inForce(config, "recompute"))];
  return [weightOption(one, config, act), budgetOption(one, config, act), pins("pinned", inForceNow, "nothing: select a value to pin it", null, act)];
}

/** A way to try what is suggested. @param {PassRecord} one @param {Act} act */
function suggestion(one, act) {
  if (one.suggests.length === 0) return null;
  const changes = { freeze: one.suggests };
  return h("button", { class: "tf-chip", disabled: !act.holds(changes), title: act.holds(changes) ? one.needs : NOT_HELD, onclick: () => act.configure(changes) }, `try ${one.suggests.join(", ")}`);
}

/** @param {PassRecord} one @param {Config} config @param {Act} act */
function weightOption(one, config, act) {
  const known = config.remat === null || WEIGHTS.some(([weight]) => weight === config.remat);
  const choices = known ? WEIGHTS : [...WEIGHTS, /** @type {[number, string]} */ ([config.remat, String(config.remat)])];
  const isHeld = (/** @type {number} */ remat) => remat === config.remat || act.holds({ remat });
  const isFixed = !one.enabled || choices.filter(([weight]) => isHeld(weight)).length < 2;
  const meaning = "how much a saved value counts that its producer's kernel reads anyway: 1 as much as any other, 0 nothing";
  return h(
    "label",
    { class: "tf-option", title: isFixed ? (one.enabled ? NOT_HELD : one.state) : meaning },
    term("input weight", meaning),
    h(
      "select",
      {
        onchange: (/** @type {any} */ e) => act.configure({ remat: Number(e.target.value) }),
        disabled: isFixed,
        "data-testid": "tf-remat-weight",
      },
      choices.map(([weight, label]) => h("option", { value: String(weight), selected: weight === (config.remat ?? 0.5), disabled: !isHeld(weight) }, label)),
    ),
  );
}

/** @param {PassRecord} one @param {Config} config @param {Act} act */
function budgetOption(one, config, act) {
  const shown = h("span", { class: "tf-budget" }, budgetText(config.memory_budget));
  const slider = h("input", {
    type: "range",
    min: "0",
    max: String(BUDGETS.length - 1),
    disabled: !act.live || !one.enabled,
    "aria-valuetext": budgetText(config.memory_budget),
    "data-testid": "tf-memory-budget",
  });
  slider.value = String(stepOf(config.memory_budget, one.saved_bytes?.[0] ?? 0));
  slider.oninput = () => {
    shown.textContent = budgetText(BUDGETS[Number(slider.value)]);
    slider.setAttribute("aria-valuetext", shown.textContent);
  };
  slider.onchange = () => act.configure({ memory_budget: BUDGETS[Number(slider.value)] });
  const title = act.live ? "share of what the forward saves for the backward that it may save; in bytes: memory_budget= in Python" : NOT_HELD;
  return h("label", { class: "tf-option", title }, term("budget", title), slider, shown);
}

/** @param {number | null} budget */
function budgetText(budget) {
  if (budget === null) return "off";
  return budget <= 1 ? `${Math.round(100 * budget)} %` : formatBytes(budget);
}

/** The slider's step for a budget, that of bytes by their share of `all`. @param {number | null} budget @param {number} all */
function stepOf(budget, all) {
  const none = BUDGETS.length - 1;
  if (budget === null) return none;
  const share = budget <= 1 ? budget : all > 0 ? budget / all : 1;
  return Math.min(none - 1, Math.max(0, Math.round(10 * share) - 1));
}

// --- pins ------------------------------------------------------------------------------------------------------------

/** @typedef {{ text: string, drop: Partial<Config> }} InForce */

/** @param {Config} config @param {"save" | "recompute"} pin @returns {(name: string) => InForce} */
function inForce(config, pin) {
  return (name) => ({ text: `${pin} ${name}`, drop: pinned(config, name, "auto") });
}

/** What is in force, each with what drops it, on one line. @param {string} label @param {InForce[]} list @param {string} none @param {Node | null} instead of `none` @param {Act} act */
function pins(label, list, none, instead, act) {
  const shown = list.length > 0 ? list.map((one) => pin(one, act)) : [instead ?? h("span", { class: "tf-note", title: none }, none)];
  return h("div", { class: "tf-option tf-pins", ...(list.length > 0 ? { "data-testid": `tf-${label}` } : {}) }, h("span", { class: "tf-option-label" }, label), h("span", { class: "tf-chips" }, shown));
}

/** @param {InForce} one @param {Act} act */
function pin({ text, drop }, act) {
  const isHeld = act.holds(drop);
  return h(
    "button",
    { class: "tf-chip", onclick: () => act.configure(drop), disabled: !isHeld, title: isHeld ? `drop “${text}”` : NOT_HELD, "aria-label": `drop ${text}`, "data-testid": `tf-drop-${text}` },
    text,
    h("span", { "aria-hidden": "true" }, " ×"),
  );
}

/** @param {PassRecord} one @param {Config} config @param {Open} open @param {Act} act */
function freezeOption(one, config, open, act) {
  const patterns = (config.freeze ?? []).join(", ");
  // What waits for an answer may be refused, and what was typed stays then.
  if (!("waits" in one) && split(open.typed.freeze ?? "").join() === (config.freeze ?? []).join()) delete open.typed.freeze;
  const typed = typing("freeze", patterns, open, (text) => act.configure({ freeze: split(text) }));
  return h(
    "label",
    { class: "tf-option", title: !act.live ? NOT_HELD : "parameters to freeze: names or globs, separated by commas" },
    "names",
    h("input", { ...typed, placeholder: one.suggests.join(", ") || "h.*.mlp.*", disabled: !act.live, "data-testid": "tf-freeze" }),
  );
}

/**
 * A field of text that keeps what was typed while the panel is drawn anew; Enter takes it then too, where no browser sees a change.
 * @param {string} name @param {string | boolean} value @param {Open} open @param {(text: string) => void} change
 */
function typing(name, value, open, change) {
  const take = (/** @type {any} */ { target }) => target.taken !== target.value && change((target.taken = target.value));
  return {
    type: "text",
    spellcheck: "false",
    value: open.typed[name] ?? value,
    oninput: (/** @type {any} */ e) => (open.typed[name] = e.target.value),
    onchange: take,
    onkeydown: (/** @type {any} */ e) => void (e.key === "Enter" && take(e)), // false would keep the key from the field
  };
}

/** @param {string} text */
function split(text) {
  return text.split(",").map((pattern) => pattern.trim()).filter(Boolean);
}

// --- the rest, folded ------------------------------------------------------------------------------------------------

/** @param {PassRecord} one @param {Config} config @param {Open} open @param {Act} act */
export function more(one, config, open, act) {
  const key = `${one.name} options`;
  const changed = one.options.filter((option) => option.value !== option.default).length;
  return h(
    "details",
    {
      class: "tf-more",
      open: open.passes.has(key),
      ontoggle: (/** @type {any} */ e) => (e.target.open ? open.passes.add(key) : open.passes.delete(key)),
    },
    h("summary", { "data-testid": `tf-options-${one.name}` }, changed > 0 ? `options: ${changed} set` : "options"),
    h("div", { class: "tf-more-options" }, one.options.map((option) => h("div", { class: "tf-more-option" }, labelled(one, option, config, open, act), explained(option)))),
  );
}

/** @param {PassRecord} one @param {PassOption} option @param {Config} config @param {Open} open @param {Act} act */
function labelled(one, option, config, open, act) {
  const typed = `${one.name}.${option.name}`;
  if (open.typed[typed] === option.value) delete open.typed[typed];
  const change = (/** @type {string | boolean} */ value) => act.configure(changes(one.name, option.name, value, config));
  const shared = { disabled: !act.live || !one.enabled, "data-testid": `tf-option-${one.name}-${option.name}` };
  const control =
    option.kind === "switch"
      ? h("input", { ...shared, type: "checkbox", checked: option.value, onchange: (/** @type {any} */ e) => change(e.target.checked) })
      : h("input", {
          ...shared,
          ...typing(typed, option.value, open, (text) => change(text.trim() || option.default)),
          inputmode: option.kind === "number" ? "decimal" : "text",
          placeholder: String(option.default || "none"),
        });
  return h("label", { class: "tf-option", title: act.live ? null : NOT_HELD }, h("span", { class: "tf-option-name" }, option.name), control);
}

/** @param {PassOption} option */
function explained(option) {
  const standard = option.kind === "switch" ? (option.default ? "on" : "off") : option.default || "none";
  return h("p", { class: "tf-note" }, option.help, option.help && " ", `(default: ${standard})`);
}

/** What changes one option and keeps the others. @param {string} pass @param {string} name @param {string | boolean} value @param {Config} config @returns {Partial<Config>} */
function changes(pass, name, value, config) {
  const field = pass === "remat" ? "remat_options" : pass;
  const before = config[field];
  return { [field]: { ...(typeof before === "object" ? before : {}), [name]: value } };
}
