// The column of passes in the order of the pipeline, the user's own among them: a switch each, the options, what it changed.

import { h, plural } from "../parts/dom.js";
import { copyButton } from "../parts/widgets.js";
import { effects, isIdle, isOwn } from "./effects.js";
import { options } from "./options.js";

const DEFAULT_WEIGHT = 0.5;
const IDLE_KEY = "changed nothing";

/** @param {Payload} payload @param {Status} status @param {Open} open @param {Act} act */
export function passes(payload, status, open, act) {
  const error = status.error?.panel === "passes" ? status.error : null;
  const isOfRow = payload.passes.some((one) => one.name === error?.at);
  const isFolded = (/** @type {PassRecord} */ one) => isIdle(one) && !isOwn(one) && !isSet(one.name, payload.config) && one.name !== open.pass && one.name !== error?.at;
  const idle = payload.passes.filter(isFolded);
  const shown = open.passes.has(IDLE_KEY) ? payload.passes : payload.passes.filter((one) => !isFolded(one));
  const element = h(
    "section",
    { class: "tf-passes", "aria-label": "Passes", "aria-busy": String(status.busy === "passes") },
    h("div", { class: "tf-passes-head" }, h("h3", null, "Passes"), ["Δ ops", "Δ saved", "Δ peak", "Δ ms"].map((title) => h("span", { class: "tf-label", "aria-hidden": "true" }, title))),
    h("ul", { class: "tf-pass-list", "data-testid": "tf-passes" }, shown.map((one) => row(one, payload, open, act, error?.at === one.name ? error.message : null))),
    idle.length > 0 && folded(idle, open, () => refold(element, passes(payload, status, open, act))),
    error && !isOfRow && alert(error.message),
    callLine(payload.call),
  );
  element.addEventListener("keydown", (event) => onKey(event, element, act));
  element.addEventListener("focusin", ({ target }) => activate(/** @type {HTMLElement} */ (target), act));
  markPass(element, open.pass);
  return element;
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
  const switches = [.../** @type {NodeListOf<HTMLElement>} */ (element.querySelectorAll(".tf-switch, .tf-idle"))];
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

/** @param {PassRecord} one @param {Payload} payload @param {Open} open @param {Act} act @param {string | null} problem what the control answered */
function row(one, payload, open, act, problem) {
  const element = h(
    "li",
    { class: `tf-pass${one.enabled ? "" : " tf-off"}${one.error ? " tf-failed" : ""}`, "data-pass": one.name, "data-testid": `tf-pass-${one.name}` },
    h(
      "div",
      { class: "tf-pass-head" },
      h("input", {
        type: "checkbox",
        role: "switch",
        class: "tf-switch",
        checked: one.enabled,
        // A disabled switch could not be reached, and its row not be walked to.
        "aria-disabled": String(!isSwitch(one)),
        "aria-label": one.name,
        "aria-description": one.help,
        onclick: (/** @type {Event} */ event) => isSwitch(one) || event.preventDefault(),
        onchange: () => act.configure({ [one.name]: switched(one) }),
        "data-testid": `tf-toggle-${one.name}`,
      }),
      h("span", { class: "tf-pass-name", title: one.help }, one.name, isOwn(one) && h("span", { class: "tf-badge" }, "yours")),
      one.enabled ? figures(one) : h("span", { class: "tf-note tf-state" }, one.state),
    ),
    one.note && h("p", { class: "tf-option" }, one.note),
    ...(one.enabled ? options(one, payload, open, act) : []),
    problem && alert(problem),
    one.error && h("p", { class: "tf-error", role: "alert" }, h("b", null, "✕ failed, and left out: "), one.error),
  );
  // The whole row is a way to its switch, but for what has a use of its own.
  element.addEventListener("click", (event) => {
    if (!(/** @type {HTMLElement} */ (event.target).closest("button, input, select, label, summary, .tf-error"))) switchOf(element).focus({ preventScroll: true });
  });
  return element;
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

/** Whether anything of the program is named for this pass: that is in force, whatever came of it. @param {string} name @param {Config} config */
function isSet(name, { freeze, save, recompute }) {
  return name === "freeze" ? Boolean(freeze?.length) : name === "remat" && save.length + recompute.length > 0;
}

/** @param {PassRecord} one */
function figures(one) {
  const isStale = one.delta_ms?.stale ?? false;
  return effects(one).map(({ text, mood, title }, at) =>
    h("span", { class: `tf-delta tf-${mood}${at === 3 && isStale ? " tf-is-stale" : ""}`, title, role: "img", "aria-label": title }, text || "—"),
  );
}

/** @param {PassRecord[]} idle @param {Open} open @param {() => void} redraw */
function folded(idle, open, redraw) {
  const isOpen = open.passes.has(IDLE_KEY);
  const toggle = () => {
    isOpen ? open.passes.delete(IDLE_KEY) : open.passes.add(IDLE_KEY);
    redraw();
  };
  const names = idle.map((one) => one.name).join(", ");
  return h("button", { class: "tf-idle", "aria-expanded": String(isOpen), onclick: toggle, title: names, "data-testid": "tf-idle-passes" }, `${plural(idle.length, "pass", "passes")} changed nothing: ${names}`);
}

/** @param {HTMLElement} was @param {HTMLElement} is */
function refold(was, is) {
  was.replaceWith(is);
  /** @type {HTMLElement | null} */ (is.querySelector(".tf-idle"))?.focus({ preventScroll: true });
}

/** @param {string} call */
function callLine(call) {
  if (!call) return h("p", { class: "tf-note", "data-testid": "tf-call" }, "re-run with ", h("code", null, "-o c"), " to use it in Python");
  return h("div", { class: "tf-call" }, h("span", { class: "tf-label" }, "In Python"), h("code", { "data-testid": "tf-call" }, call), copyButton(call));
}
