// What tells two configurations apart: their figures, the options that differ, each module with its lines, each pass.

import { bounds, figure, formatBytes, formatTime, h, plural } from "../parts/dom.js";
import { KINDS } from "../parts/widgets.js";

/** @param {Comparison} found @param {() => void} back */
export function comparison(found, back) {
  const [one, other] = found.sides;
  const isOneCapture = one.capture === other.capture;
  const isOneChoice = one.name === other.name;
  const names = found.sides.map((side) => (isOneCapture ? side.name : isOneChoice ? side.label : `${side.label}: ${side.name}`));
  const heads = [names[0], names[1], "difference"];
  return h(
    "section",
    { class: "tf-comparison", "data-testid": "tf-comparison" },
    h("div", { class: "tf-comparison-head" }, h("button", { class: "tf-chip", onclick: back, "data-testid": "tf-comparison-back" }, "← all that was tried"), h("h3", null, names[0], " → ", names[1])),
    h(
      "table",
      { class: "tf-table" },
      head(["", ...heads]),
      h("tbody", null, whole("step", one.step_us, other.step_us, formatTime, found.sides.map(({ kind }) => `${KINDS[kind][0]} `)), measured(one.measured, other.measured), whole("peak memory", one.peak_bytes, other.peak_bytes, formatBytes), whole("saved for backward", one.saved_bytes, other.saved_bytes, formatBytes), whole("ops", one.ops, other.ops, String)),
    ),
    h("p", { class: "tf-note" }, `Times ${one.provenance === other.provenance ? one.provenance : `${one.provenance}; ${other.provenance}`}. Steps ${[...new Set(found.sides.map(({ measured }) => measured?.where ?? "not measured"))].join(", ")}.`),
    found.options.length > 0 && h("table", { class: "tf-table" }, head(["option", names[0], names[1]], ""), h("tbody", null, found.options.map(([name, ...both]) => h("tr", null, h("th", { scope: "row" }, name), both.map((text) => h("td", null, h("code", null, text))))))),
    h("h4", null, "By module"),
    found.modules.length > 0 ? modules(found, heads) : h("p", { class: "tf-note" }, "Every module takes the same: these are one program."),
    h("h4", null, "By pass"),
    passes(found, names),
  );
}

/** @param {string[]} titles @param {string} [figures] the class of all but the first */
const head = (titles, figures = "tf-right") => h("thead", null, h("tr", null, titles.map((title, at) => h("th", { scope: "col", class: at > 0 ? figures : null, title }, title))));

/** @param {string} label @param {number} one @param {number} other @param {(amount: number) => string} format @param {string[]} kinds */
function whole(label, one, other, format, kinds = ["", ""]) {
  return h("tr", null, h("th", { scope: "row" }, label), h("td", { class: "tf-right" }, kinds[0], format(one)), h("td", { class: "tf-right" }, kinds[1], format(other)), h("td", { class: "tf-right" }, delta(other - one, format)));
}

/** The step as either was timed; a difference only where both were timed on one device. @param {...Comparison["sides"][number]["measured"]} both */
function measured(...both) {
  const [one, other] = both;
  const ms = (/** @type {number} */ amount) => `${figure(amount)} ms`;
  const cells = both.map((step) => h("td", { class: "tf-right", title: step?.where }, step ? [ms(step.median), h("small", { class: "tf-note" }, ` ${bounds(step, figure)}`)] : h("span", { class: "tf-note" }, "not measured")));
  return h("tr", { "data-testid": "tf-comparison-measured" }, h("th", { scope: "row" }, "step, measured"), ...cells, h("td", { class: "tf-right" }, one && other && one.where === other.where ? delta(other.median - one.median, ms) : ""));
}

/** @param {number} amount @param {(amount: number) => string} format */
function delta(amount, format) {
  if (amount === 0) return "±0";
  return h("span", { class: amount < 0 ? "tf-gain" : "tf-cost" }, `${amount < 0 ? "−" : "+"}${format(Math.abs(amount))}`);
}

/** @param {Comparison} found @param {string[]} heads */
function modules({ modules: rows, left_out: leftOut }, heads) {
  const body = rows.flatMap((row) => {
    const lines = row.lines.map((one) =>
      h("tr", { class: "tf-comparison-line", hidden: true }, h("td", { title: `${one.place}  ${one.text}` }, h("code", null, one.place ? `${one.place}  ${one.text}` : "no line of yours")), sides(one.us, one.ops), h("td", { class: "tf-right" }, delta(one.us[1] - one.us[0], formatTime)), h("td", null)),
    );
    const toggle = h("button", { class: "tf-disclose", "aria-expanded": "false", onclick: () => unfold(toggle, lines) }, row.path || row.module_type || "(no module)", row.count > 1 ? ` ×${row.count}` : "");
    const saved = row.saved_bytes[1] - row.saved_bytes[0];
    return [h("tr", { "data-module": row.path }, h("th", { scope: "row" }, row.lines.length > 0 ? toggle : toggle.textContent), sides(row.us, row.ops), h("td", { class: "tf-right" }, delta(row.us[1] - row.us[0], formatTime)), h("td", { class: "tf-right" }, saved === 0 ? "" : delta(saved, formatBytes))), ...lines];
  });
  return [
    h("table", { class: "tf-table tf-comparison-modules" }, head(["module", ...heads, "saved"]), h("tbody", null, body)),
    leftOut > 0 && h("p", { class: "tf-note" }, `and ${plural(leftOut, "module")} with smaller differences`),
  ].filter((one) => one instanceof HTMLElement);
}

/** @param {[number, number]} us @param {[number, number]} ops */
function sides(us, ops) {
  return [0, 1].map((side) => h("td", { class: "tf-right" }, ops[side] === 0 && us[side] === 0 ? h("span", { class: "tf-note" }, "not there") : [formatTime(us[side]), h("small", { class: "tf-note" }, ops[side] === 0 ? " in a kernel" : ` ${plural(ops[side], "op")}`)]));
}

/** @param {HTMLElement} toggle @param {HTMLElement[]} lines */
function unfold(toggle, lines) {
  const isOpen = toggle.getAttribute("aria-expanded") !== "true";
  toggle.setAttribute("aria-expanded", String(isOpen));
  for (const line of lines) line.hidden = !isOpen;
}

/** @param {Comparison} found @param {string[]} names */
function passes({ passes: rows }, names) {
  const side = (/** @type {Comparison["passes"][number]} */ row, /** @type {number} */ at) => {
    if (row.states[at] !== "on") return h("span", { class: "tf-note" }, row.states[at]);
    const [us, bytes] = [row.delta_us[at] ?? 0, row.saved_bytes[at] ?? 0];
    return us === 0 && bytes === 0 ? h("span", { class: "tf-note" }, "changes nothing") : h("span", null, delta(us, formatTime), bytes === 0 ? "" : h("small", null, " saved ", delta(bytes, formatBytes)));
  };
  return h("table", { class: "tf-table" }, head(["pass", ...names]), h("tbody", null, rows.map((row) => h("tr", { class: same(row) ? "tf-same-row" : null }, h("th", { scope: "row" }, row.name), h("td", { class: "tf-right" }, side(row, 0)), h("td", { class: "tf-right" }, side(row, 1))))));
}

/** @param {Comparison["passes"][number]} row */
const same = ({ states, delta_us: us, saved_bytes: bytes }) => states[0] === states[1] && us[0] === us[1] && bytes[0] === bytes[1];
