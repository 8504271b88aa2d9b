// The column of passes in the order of the pipeline, the user's own among them: a switch each, what it changed or needs, its options.
// Every pass is a row of one height, on or off, so that no switch moves when another one is used.

import { h } from "../parts/dom.js";
import { copyButton, NAMELESS, term } from "../parts/widgets.js";
import { effects, isInPlace } from "./effects.js";
import { more, options } from "./options.js";

const DEFAULT_WEIGHT = 0.5;
/** Options that are not called after their pass. */
const OF_REMAT = new Set(["memory_budget", "peak_budget", "remat_options", "save", "recompute"]);
const TITLES = /** @type {[string, string][]} */ ([
  ["Δ ops", "operators that do work"],
  ["Δ saved", "bytes that the forward keeps for the backward"],
  ["Δ peak", "the most bytes alive at once in the step, as the trace says"],
  ["Δ time", "of the whole step, by the clock of the headline"],
]);
const A_PASS = "A pass rewrites the program that ran, to take less time or memory; your code stays as it is. Figures:";
const ALONE = "each alone: the step with it minus the step without it, so that they do not add up; in italics until that is known: what it changed in its place";

/** @param {Payload} payload its configuration as it was chosen last @param {Status} status @param {Partial<Config>} pending what of that has no numbers yet @param {Open} open @param {Act} act */
export function passes(payload, status, pending, open, act) {
  const waits = status.busy === "passes" ? "computing its numbers…" : "waiting for the kernel…";
  const rows = payload.passes.map((one) => awaited(one, pending, waits));
  const error = status.error?.panel === "passes" ? status.error : null;
  const isOfRow = payload.passes.some((one) => one.name === error?.at);
  const element = h(
    "section",
    { class: "tf-passes", "aria-label": "Passes", "aria-busy": String(status.busy === "passes") },
    h("div", { class: "tf-passes-top" }, h("h3", null, "Passes"), h("abbr", { class: "tf-label tf-passes-how", title: `${A_PASS} ${ALONE}`, "data-testid": "tf-passes-how" }, how(payload.passes)), step("undo", "↶", "take the last choice back (Ctrl Z)", act.history.canUndo, act.undo), step("redo", "↷", "make it again (Ctrl Shift Z)", act.history.canRedo, act.redo)),
    h("div", { class: "tf-passes-head" }, TITLES.map(([word, meaning]) => h("abbr", { class: "tf-label", title: `${meaning}: ${ALONE}` }, word))),
    h("ul", { class: "tf-pass-list", "data-testid": "tf-passes" }, rows.map((one) => row(one, payload, open, act, error?.at === one.name ? error.message : null))),
    error && !isOfRow && alert(error.message),
    callLine(payload.call),
  );
  element.addEventListener("keydown", (event) => closeOptions(event) || onKey(event, element, act));
  element.addEventListener("pointerdown", ({ target }) => closeOthers(element, /** @type {HTMLElement} */ (target)));
  element.addEventListener("focusin", ({ target }) => activate(/** @type {HTMLElement} */ (target), act));
  markPass(element, open.pass);
  return element;
}

/** A pass as it was chosen, before there are numbers of it. @param {PassRecord} one @param {Partial<Config>} pending @param {string} waits @returns {PassRecord & { waits?: boolean }} */
function awaited(one, pending, waits) {
  const isWaiting = Object.keys(pending).some((key) => (OF_REMAT.has(key) ? "remat" : key) === one.name);
  if (!isWaiting) return one;
  const value = one.name in pending ? pending[one.name] : one.enabled;
  const enabled = value !== null && value !== false;
  const given = /** @type {Record<string, any>} */ ((one.name === "remat" ? pending.remat_options : pending[one.name]) || {});
  const options = one.options.map((option) => (option.kind === "switch" ? { ...option, value: given[option.name] ?? option.value } : option));
  return { ...one, enabled, options, state: enabled ? one.state : "off", needs: waits, changed: false, error: null, waits: true };
}

/** What the figures are of, in words. @param {PassRecord[]} passes */
function how(passes) {
  const told = passes.filter((one) => one.enabled && one.changed);
  const inOrder = told.filter(isInPlace).length;
  if (inOrder === told.length) return inOrder > 0 && "effect of each in turn";
  return inOrder > 0 ? "effects, some in turn" : told.length > 1 ? "each alone; effects overlap" : "effect of each alone";
}

/** @param {"undo" | "redo"} id @param {string} glyph @param {string} title @param {boolean} can @param {() => void} act */
function step(id, glyph, title, can, act) {
  return h("button", { class: "tf-chip tf-step", "aria-label": id, title, disabled: !can, onclick: act, "data-testid": `tf-${id}` }, glyph);
}

/** Escape closes the options that it is pressed in, which lie over other rows. @param {KeyboardEvent} event @returns {boolean} whether it did */
function closeOptions(event) {
  const open = /** @type {HTMLDetailsElement | null} */ (/** @type {HTMLElement} */ (event.target).closest("details[open]"));
  if (event.key !== "Escape" || !open) return false;
  open.open = false;
  /** @type {HTMLElement | null} */ (open.querySelector("summary"))?.focus({ preventScroll: true });
  return true;
}

/** @param {HTMLElement} element @param {HTMLElement} target */
function closeOthers(element, target) {
  for (const open of /** @type {NodeListOf<HTMLDetailsElement>} */ (element.querySelectorAll("details[open]"))) if (!open.contains(target)) open.open = false;
}

/** Mark the row of the pass whose work is shown; Tab comes back to it. @param {HTMLElement} inside @param {string} name */
export function markPass(inside, name) {
  const rows = /** @type {HTMLElement[]} */ ([...inside.querySelectorAll("[data-pass]")]);
  const isThere = rows.some((row) => row.dataset.pass === name);
  rows.forEach((row, at) => {
    const isActive = row.dataset.pass === name;
    row.classList.toggle("tf-active", isActive);
    switchOf(row).tabIndex = isActive || (!isThere && at === 0) ? 0 : -1;
  });
}

/** @param {HTMLElement} row */
function switchOf(row) {
  return /** @type {HTMLInputElement} */ (row.querySelector(".tf-switch"));
}

/** @param {HTMLElement} target @param {Act} act */
function activate(target, act) {
  const row = /** @type {HTMLElement | null} */ (target.closest("[data-pass]"));
  if (row) act.showPass(row.dataset.pass ?? "");
}

/** ↑ and ↓ on a switch walk the rows, Escape leaves them. @param {KeyboardEvent} event @param {HTMLElement} element @param {Act} act */
function onKey(event, element, act) {
  if (event.key === "Escape") return act.showPass("");
  const switches = [.../** @type {NodeListOf<HTMLElement>} */ (element.querySelectorAll(".tf-switch"))];
  const at = switches.findIndex((one) => one === event.target);
  const to = { ArrowUp: Math.max(0, at - 1), ArrowDown: at + 1, Home: 0, End: -1 }[event.key];
  if (at < 0 || to === undefined) return;
  event.preventDefault();
  switches.at(Math.min(to, switches.length - 1))?.focus();
}

/** @param {string} message */
function alert(message) {
  return h("p", { class: "tf-error", role: "alert", "data-testid": "tf-error-passes" }, message);
}

/** @param {PassRecord & { waits?: boolean }} one @param {Payload} payload @param {Open} open @param {Act} act @param {string | null} problem what the control answered */
function row(one, payload, open, act, problem) {
  // What is on show is a choice that a saved page has, and a view that lost its kernel has none.
  const isFree = isSwitch(one) && act.holds({});
  const element = h(
    "li",
    { class: `tf-pass${one.enabled ? "" : " tf-off"}${one.error ? " tf-failed" : ""}${one.waits ? " tf-waits" : ""}`, "data-pass": one.name, "aria-busy": one.waits ? "true" : null, "data-testid": `tf-pass-${one.name}` },
    h(
      "div",
      { class: "tf-pass-head" },
      h("input", {
        type: "checkbox",
        role: "switch",
        class: "tf-switch",
        checked: one.enabled,
        // A disabled switch could not be reached, and its row not be walked to.
        "aria-disabled": String(!isFree),
        "aria-label": one.name,
        "aria-description": one.help,
        onclick: (/** @type {Event} */ event) => isFree || event.preventDefault(),
        onchange: () => act.configure({ [one.name]: switched(one) }),
        "data-testid": `tf-toggle-${one.name}`,
      }),
      h("abbr", { class: "tf-pass-name tf-term", title: one.help }, one.name),
      one.own && h("span", { class: "tf-badge" }, "yours"),
      one.options.length > 0 && more(one, payload.config, open, act),
      one.note && h("abbr", { class: "tf-info", title: one.note, tabindex: "0", "aria-label": `note: ${one.note}` }, "i"),
    ),
    h("div", { class: "tf-pass-says" }, one.enabled && one.changed && !one.error ? figures(one, payload) : says(one)),
    ...options(one, payload, open, act),
    problem && alert(problem),
    one.error && !problem && h("p", { class: "tf-error", role: "alert" }, h("b", null, "✕ failed, and left out: "), one.error),
  );
  // The whole row is a way to its switch, but for what has a use of its own.
  element.addEventListener("click", (event) => {
    if (!(/** @type {HTMLElement} */ (event.target).closest("button, input, select, label, summary, details, .tf-error"))) switchOf(element).focus({ preventScroll: true });
  });
  return element;
}

/** What an idle pass would need, or that it is off. @param {PassRecord} one */
function says(one) {
  const text = one.needs || one.state;
  return [h("span", { class: "tf-note tf-state", title: text }, text)];
}

/** Whether there is anything to switch. @param {PassRecord} one */
function isSwitch(one) {
  return one.enabled || one.state === "off";
}

/** What the switch sends: a pass with an option goes on with its default. @param {PassRecord} one */
function switched(one) {
  if (one.name === "freeze") return one.enabled ? null : [];
  if (one.name === "remat") return one.enabled ? null : DEFAULT_WEIGHT;
  return !one.enabled;
}

/** @param {PassRecord} one @param {Payload} payload */
function figures(one, payload) {
  return effects(one, payload).map(({ text, mood, title, isPredicted }) =>
    h("span", { class: `tf-delta tf-${mood}${isInPlace(one) ? " tf-is-stale" : ""}${isPredicted ? " tf-hatched" : ""}`, title, role: "img", "aria-label": title }, text || "—"),
  );
}

/** @param {string} call */
function callLine(call) {
  if (!call) return h("p", { class: "tf-note", "data-testid": "tf-call" }, `${NAMELESS}, to use it in Python`);
  return h("div", { class: "tf-call" }, h("span", { class: "tf-label" }, term("These passes in Python", `${call.split(".")[0]} is the capture; tracefuse.load reads it from a session file, which tracefuse FILE --session c.tfz writes`)), h("code", { "data-testid": "tf-call" }, call), copyButton(call));
}
