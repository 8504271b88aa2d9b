// The dialog that asks what a sweep is to try: weights and budgets of remat, what becomes of gathered parameters, and passes to
// be left out or put in.

import { h, plural } from "../parts/dom.js";

/** @type {[string, number][]} */
const WEIGHTS = [["1", 1], ["½", 0.5], ["0", 0]];
/** @type {[string, number | null][]} */
const BUDGETS = [["off", null], ["75 %", 0.75], ["50 %", 0.5], ["25 %", 0.25], ["10 %", 0.1]];
/** What becomes of parameters that were gathered from other ranks for the forward. @type {[string, boolean | null][]} */
const RESHARDS = [["as recorded", null], ["freed behind the forward", true], ["kept", false]];
/** What `MOST_SWEPT` of tracefuse.widgets.view.boarding allows. */
const MOST = 256;

/** @param {HTMLElement} host @param {Payload} payload @param {boolean} gathers @param {(message: Message) => void} send */
export function askForSweep(host, payload, gathers, send) {
  const weights = boxes("weight", WEIGHTS, true);
  const budgets = boxes("budget", BUDGETS, true);
  // A pass that is off since it needs another one has nothing to switch; remat is asked for above, and overlap where it gathers.
  const passes = boxes("pass", payload.passes.filter((one) => one.name !== "remat" && !(gathers && one.name === "overlap") && (one.enabled || one.state === "off")).map((one) => [one.name, one.name]), false);
  const reshards = gathers ? boxes("reshard", RESHARDS, true) : null;
  const said = h("p", { class: "tf-note", role: "status", "data-testid": "tf-sweep-count" });
  const start = h("button", { class: "tf-button tf-primary", "data-testid": "tf-sweep-start" }, "Try them");
  const count = () => [weights, budgets, reshards].reduce((n, one) => n * (one?.chosen().length || 1), 2 ** passes.chosen().length);
  const dialog = h(
    "dialog",
    { class: "tf-keys tf-sweep", role: "dialog", "aria-label": "Sweep", onclose: () => dialog.remove(), "data-testid": "tf-sweep" },
    h("div", { class: "tf-keys-head" }, h("h3", null, "Sweep"), h("button", { class: "tf-chip", "aria-label": "close", onclick: () => dialog.close() }, "×")),
    h("p", null, "Tries every combination. Nothing is timed: steps are predicted from what was measured, or modelled."),
    group("remat: input weight", weights.elements),
    group("remat: budget on what is saved", budgets.elements),
    reshards ? group("overlap: gathered parameters", reshards.elements) : "",
    group("with and without these passes", passes.elements),
    h("div", { class: "tf-sweep-foot" }, said, start),
  );
  const tell = () => {
    const isMany = count() > MOST;
    said.textContent = isMany ? `${count()} configurations: a sweep takes at most ${MOST}` : plural(count(), "configuration");
    start.disabled = isMany;
  };
  dialog.addEventListener("change", tell);
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  start.onclick = () => {
    dialog.close();
    const asked = { weights: weights.chosen(), budgets: budgets.chosen(), passes: passes.chosen() };
    send({ type: "sweep", ...asked, ...(reshards ? { reshards: reshards.chosen() } : {}) });
  };
  tell();
  host.append(dialog);
  dialog.showModal();
}

/** @param {string} title @param {HTMLElement[]} content */
const group = (title, content) => h("fieldset", null, h("legend", null, title), content);

/** @template T @param {string} id @param {[string, T][]} choices @param {boolean} areOn */
function boxes(id, choices, areOn) {
  const made = choices.map(([label, value]) => ({ value, box: h("input", { type: "checkbox", checked: areOn, "data-testid": `tf-sweep-${id}-${label}` }), label }));
  return {
    elements: made.map(({ box, label }) => h("label", null, box, ` ${label}`)),
    chosen: () => made.filter(({ box }) => box.checked).map(({ value }) => value),
  };
}
