// What to do first: the biggest lever that nobody has pulled yet, with its line, its fix and a button; beside it what comes then.

import { h } from "../parts/dom.js";
import { codeOf, copyButton, KINDS } from "../parts/widgets.js";

/** Letters that stand on the two lines of a card. */
const MOST_SAID = 120;

/** @typedef {Payload["sentence"]["actions"][number]} Action */

/** Each in a place of its own. @param {Payload} payload @param {Act} act */
export function first({ sentence, findings, looked_for: lookedFor, config }, act) {
  // What switches a pass off is about no finding.
  const of = (/** @type {Action} */ one) => /** @type {Finding} */ (findings.find(({ key }) => key === one.key) ?? one.instead);
  const actions = sentence.actions.filter(of);
  const todo = actions.filter(({ by }) => by.length === 0);
  const lever = sentence.is_small ? undefined : todo[0];
  const left = lever ? todo.slice(1) : todo;
  // In the order of their numbers; what passes mend already has none, and comes last.
  const others = [...left, ...actions.filter(({ by }) => by.length > 0)];
  const then = h("div", { class: "tf-then" }, others.map((one, at) => card(one, of(one), `tf-first-${at + 1}`, at + (lever ? 2 : 1), act)));
  if (lever) return [leverOf(lever, of(lever), config, act), then];
  const nothing = lookedFor.length === 0 ? "This trace was not diagnosed." : `Nothing ${left.length > 0 ? "big is left: each of these is worth less than 5 % of the step" : others.length > 0 ? "else is left to mend" : "to mend was found"}; ${lookedFor.length} patterns were looked for.`;
  return [h("p", { class: "tf-lever tf-note" }, nothing), then];
}

/** @param {Action} action @param {Finding} finding @param {Config} config @param {Act} act */
function leverOf(action, finding, config, act) {
  const { title, key } = action;
  const [place, line = ""] = finding.source.split("  ");
  return h(
    "div",
    { class: "tf-lever", "data-testid": "tf-lever" },
    h("button", { class: "tf-lever-what", title: `${title}: all about it`, onclick: () => act.openFinding(key), "data-finding": key, "data-testid": "tf-first-0" }, h("b", null, 1), h("span", null, title)),
    h("span", { class: "tf-lever-place" }, place && h("code", { title: finding.source }, place, h("span", { class: "tf-note" }, ` ${line}`))),
    worthOf(action),
    h("span", { class: "tf-lever-fix", title: finding.fix }, h("span", { class: "tf-label" }, "fix "), finding.fix),
    apply(finding, config, act),
  );
}

/** What does it: the switch of a pass, or else the code to take along. @param {Finding} finding @param {Config} config @param {Act} act */
function apply(finding, config, act) {
  const { changes } = finding;
  const isOn = changes && Object.entries(changes).every(([option, value]) => JSON.stringify(config[option]) === JSON.stringify(value));
  if (!changes || isOn || !act.holds(changes)) return copyButton(codeOf(finding), "tf-apply", "Copy fix");
  return h("button", { class: "tf-button tf-primary tf-apply", title: `${JSON.stringify(changes)}: see what changes`, onclick: () => act.configure(changes), "data-testid": "tf-apply" }, "Apply");
}

/** What is left to do about it in a few words, and its place, as far as the card has room beside what it says anyway; what is mended has no line to edit. @param {Action} action @param {Finding} finding */
function inBrief({ title, brief, worth, by }, { source, is_mended: isMended }) {
  const [place] = source.split("  ");
  const told = isMended ? ["the pass mends it"] : by.length > 0 ? ["mended in part", place] : [brief && `→ ${brief}`, place];
  let room = MOST_SAID - `${title}${worth}${by}`.length;
  return told.map((one) => (one.length <= room ? ((room -= one.length), one) : ""));
}

/** @param {Action} action @param {Finding} finding @param {string} id @param {number} number @param {Act} act */
function card(action, finding, id, number, act) {
  const { title, key, by } = action;
  const isDone = by.length > 0;
  const [brief, place] = inBrief(action, finding);
  return h("button", { class: `tf-action-card${isDone ? " tf-pulled" : ""}`, title: `${title}: all about it`, onclick: () => act.openFinding(key), "data-finding": key, "data-testid": id }, h("b", null, isDone ? `✓ ${by.join(" ")}` : number), h("span", null, title, brief && h("small", null, brief), place && h("small", null, h("code", null, place)), worthOf(action)));
}

/** @param {Action} action */
function worthOf({ worth, kind }) {
  return worth && h("small", { class: "tf-worth" }, kind && h("span", { title: `${kind}: ${KINDS[kind][1]}`, role: "img", "aria-label": kind }, KINDS[kind][0], " "), worth);
}
