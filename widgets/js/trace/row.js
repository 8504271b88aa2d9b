// One row of the trace's tree as an element.

import { figure, formatBytes, h } from "../parts/dom.js";
import { placeOf, spread, time } from "../parts/modules.js";
import { inUnit, percent } from "../parts/widgets.js";

/** @typedef {import("../parts/modules.js").Branch} Branch */

/**
 * @typedef {object} Context
 * @property {boolean} hasRatios
 * @property {boolean} hasUpdate
 * @property {Record<string, Value>} values
 * @property {import("../parts/modules.js").Tree} tree
 * @property {ReturnType<typeof import("../parts/widgets.js").unitOf>} unit
 * @property {string} provenance of the times of what is never used
 * @property {(name: string) => boolean} isPredicted
 * @property {Set<Branch>} predicted those with predicted times in them
 * @property {Set<string> | null} matches of the search
 * @property {Map<Branch, number>} hits how many are in each branch
 * @property {Set<string>} twins of the selected value
 * @property {Map<string, "+" | "-" | "~">} changes
 * @property {Set<Branch>} slowest
 * @property {import("./rows.js").State} state
 * @property {string} active
 * @property {string} selected
 */

const GLYPHS = { "+": "+", "-": "−", "~": "~" };
const CHANGES = { "+": "new", "-": "removed by a pass", "~": "changed by a pass" };
const KINDS = { "+": "plus", "-": "minus", "~": "mod" };

/** @param {import("./rows.js").Row} row @param {string} id @param {number} index from 1, the header's @param {Context} context */
export function rowElement(row, id, index, context) {
  const attributes = { id, role: "row", "data-row": index - 2, "aria-level": row.level, "aria-rowindex": index };
  if (row.kind === "note") return h("div", { ...attributes, class: "tf-tree-row tf-tree-note" }, h("span", { role: "gridcell", "aria-colspan": context.hasUpdate ? 8 : 7, style: indent(row.level) }, noteText(row.group, context)));
  const active = row.key === context.active ? " tf-tree-active" : "";
  if (row.kind === "unused") return unusedRow(row, { ...attributes, class: `tf-tree-row tf-tree-unused${active}` }, context);
  return row.kind === "group" ? groupRow(row, { ...attributes, class: `tf-tree-row tf-tree-group${active}` }, context) : pairRow(row, { ...attributes, class: `tf-tree-row${active}` }, context);
}

/** @param {number} level */
const indent = (level) => `padding-left: ${14 * (level - 1)}px`;

// --- modules and lines ----------------------------------------------------------------------------------------------

/** @param {import("./rows.js").GroupRow} row @param {Record<string, any>} attributes @param {Context} context */
function groupRow({ group, level, open }, attributes, context) {
  const { tree } = context;
  const { sums, shown, layers } = group;
  const isLine = shown.kind === "line";
  const isPredicted = group.members.some((one) => context.predicted.has(one));
  return h(
    "div",
    { ...attributes, "aria-expanded": String(open), "data-testid": `tf-tree-${shown.path || shown.type}${isLine ? `#${placeOf(shown.name)}` : ""}` },
    h(
      "span",
      { role: "gridcell", class: "tf-tree-name", style: indent(level), title: isLine ? shown.name : [shown.path, shown.type].filter(Boolean).join(": ") },
      h("span", { class: "tf-tree-twisty", "aria-hidden": "true" }, open ? "▾" : "▸"),
      ...(isLine ? lineName(shown.name) : [h("b", null, group.name)]),
      slowMark(group, open, context),
      isLine && togetherWith(group, context),
      layers.length > 0 && timesBadge(group, context),
      hitsIn(group, context),
      !isLine && group.name !== shown.type && h("span", { class: "tf-note" }, shown.type),
    ),
    timeCell(sums.forward, context, isPredicted),
    timeCell(sums.backward, context, isPredicted),
    context.hasUpdate && timeCell(sums.update, context, isPredicted),
    h("span", { role: "gridcell", class: "tf-tree-ratio" }, !context.hasRatios || !sums.forward[1] || !sums.backward[1] ? "" : times(sums.backward[1] / sums.forward[1])),
    h("span", { role: "gridcell", class: "tf-tree-share" }, percent(time(sums), time(tree.total))),
    opsCell(sums.ops),
    savedCell(sums.saved, context),
  );
}

/** How much of what is searched for is inside. @param {import("./rows.js").Group} group @param {Context} context */
function hitsIn({ members }, { hits }) {
  const count = members.reduce((sum, one) => sum + (hits.get(one) ?? 0), 0);
  return count > 0 && h("span", { class: "tf-hits", title: `${count} found in here`, "data-testid": "tf-hits" }, `⌕ ${count}`);
}

/** @param {string} line "src/gpt.py:69  place = torch.arange(…)" */
function lineName(line) {
  const place = placeOf(line);
  return place ? [h("span", { class: "tf-tree-number" }, place), h("code", null, line.slice(line.indexOf("  ") + 2))] : [h("span", { class: "tf-note" }, line)];
}

/** The other lines of kernels that are laid on this one. @param {import("./rows.js").Group} group @param {Context} context */
function togetherWith({ members, shown }, { values }) {
  const kernels = members.flatMap((one) => one.values).map((name) => values[name]).filter(({ lines, removed }) => lines.length > 0 && !removed);
  const others = [...new Set(kernels.flatMap(({ lines }) => lines.map(([text]) => text)))].filter((text) => text !== shown.name);
  if (others.length === 0) return null;
  const numbers = others.map((text) => placeOf(text) || "no line");
  const title = `kernels do the work of these lines too, and their whole time stands here:\n${others.join("\n")}`;
  return h("span", { class: "tf-note tf-tree-with", title, "data-testid": "tf-tree-with" }, `with ${others.length === 1 ? "line" : "lines"} ${numbers.join(", ")}`);
}

/** @param {import("./rows.js").Group} group @param {Context} context */
function timesBadge({ key, layers }, { state }) {
  const isApart = state.apart.has(key);
  const label = isApart ? "fold the identical layers" : "list the layers one by one";
  return h("button", { class: "tf-chip tf-tree-times", tabindex: "-1", "aria-pressed": String(isApart), "aria-label": `${layers.length} identical layers: ${label}`, title: `${label} (x)`, "data-testid": "tf-tree-times" }, `×${layers.length}`);
}

/** @param {import("./rows.js").Group} group @param {Context} context */
function noteText({ layers, members, shown }, { unit }) {
  if (layers.length === 0) return `times of one: ${shown.path}, of ${members.length} identical`;
  const { median, slowest } = spread(layers);
  const text = (/** @type {number} */ us) => `${inUnit(us, unit)} ${unit.name}`;
  const isEven = time(slowest.sums) <= 1.005 * median;
  return isEven ? `each layer ${text(median)}` : `each layer: median ${text(median)}, slowest ${slowest.path} ${text(time(slowest.sums))}`;
}

/** ▲ at what is slowest, △ at the closed one around it. @param {import("./rows.js").Group} group @param {boolean} open @param {Context} context */
function slowMark({ members }, open, { slowest }) {
  const mark = (/** @type {string} */ glyph, /** @type {string} */ label) => h("em", { role: "img", "aria-label": label, title: label }, glyph);
  if (members.some((one) => slowest.has(one))) return mark("▲", "slowest");
  const isAround = (/** @type {Branch | null} */ one) => {
    while (one && !members.includes(one)) one = one.parent;
    return one !== null;
  };
  return !open && [...slowest].some(isAround) && mark("△", "the slowest is in here");
}

/** @param {import("../parts/modules.js").Pair} us @param {Context} context @param {boolean} isPredicted */
function timeCell([before, after], { tree, unit }, isPredicted) {
  const { forward, backward, update } = tree.total;
  const scale = Math.max(...forward, ...backward, ...update);
  const width = (/** @type {number} */ part) => `width: ${Math.min(100, (100 * part) / scale)}%`;
  const change = before === after ? "" : `before ${inUnit(before, unit)} ${unit.name}`;
  return h(
    "span",
    { role: "gridcell", class: "tf-tree-time", title: [change, isPredicted && "predicted"].filter(Boolean).join("; ") || null },
    after > 0 && h("i", { class: `tf-tree-fill${isPredicted ? " tf-hatched" : ""}`, style: width(after) }),
    before > 0 && h("i", { class: "tf-tree-ghost", style: width(before) }),
    h("span", null, after > 0 ? inUnit(after, unit) : before > 0 ? "–" : ""),
  );
}

/** @param {import("../parts/modules.js").Pair} ops */
function opsCell([before, after]) {
  if (before === 0 && after === 0) return h("span", { role: "gridcell", class: "tf-tree-ops" });
  if (before === after) return h("span", { role: "gridcell", class: "tf-tree-ops" }, after);
  return h("span", { role: "gridcell", class: "tf-tree-ops" }, h("span", { class: "tf-tree-was" }, before), " → ", after);
}

/** @param {number} nbytes @param {Context} context */
function savedCell(nbytes, { tree }) {
  const width = `width: ${tree.total.saved ? (100 * nbytes) / tree.total.saved : 0}%`;
  return h("span", { role: "gridcell", class: "tf-tree-saved" }, nbytes > 0 && h("i", { class: "tf-tree-fill", style: width }), h("span", null, nbytes > 0 ? formatBytes(nbytes) : ""));
}

// --- ops -------------------------------------------------------------------------------------------------------------

/** @param {import("./rows.js").PairRow} row @param {Record<string, any>} attributes @param {Context} context */
function pairRow({ left, right, level }, attributes, context) {
  const { values, selected } = context;
  const isSelected = selected !== "" && (selected === left || selected === right);
  const isUpdate = left !== "" && values[left].phase === "update";
  const names = isUpdate ? ["", "", left] : context.hasUpdate ? [left, right, ""] : [left, right];
  const times = names.map((name) => (name ? values[name].time_us : [null, null]));
  return h(
    "div",
    { ...attributes, "aria-selected": String(isSelected), "data-testid": `tf-op-${left || right}` },
    h("span", { role: "gridcell", class: `tf-tree-name ${stateOf(left, context)}`, style: indent(level) }, left && valueName(left, context)),
    ...times.map(([before, after], at) => timeCell([before ?? 0, after ?? 0], context, names[at] !== "" && context.isPredicted(names[at]))),
    h("span", { role: "gridcell", "aria-colspan": 3, class: `tf-tree-right ${stateOf(right, context)}` }, right && valueName(right, context)),
    savedCell(left && !values[left].removed ? values[left].saved_bytes : 0, context),
  );
}

/** @param {import("./rows.js").UnusedRow} row @param {Record<string, any>} attributes @param {Context} context */
function unusedRow({ op, level }, attributes, { unit, provenance, hasUpdate }) {
  const name = op.op.replace(/^aten\.(\w+).*$/, "$1");
  const time = (/** @type {string} */ phase) => h("span", { role: "gridcell", class: "tf-tree-time" }, op.phase === phase ? h("span", null, `≈ ${inUnit(op.time_us, unit)}`) : "");
  return h(
    "div",
    { ...attributes, title: `${op.op}: computed, never used, so no part of the trace and of no sum\n${figure(op.time_us)} µs (${provenance}), writes ${formatBytes(op.nbytes)}`, "data-testid": "tf-tree-unused" },
    h("span", { role: "gridcell", class: "tf-tree-name", style: indent(level) }, h("span", { class: "tf-tree-value" }, h("span", { class: "tf-tree-glyph", "aria-hidden": "true" }, "∅"), h("code", null, name))),
    time("forward"),
    time("backward"),
    hasUpdate && time("update"),
    h("span", { role: "gridcell", "aria-colspan": 3, class: "tf-tree-right" }, "computed, never used"),
    h("span", { role: "gridcell", class: "tf-tree-saved" }, h("span", null, formatBytes(op.nbytes))),
  );
}

/** @param {string} name @param {Context} context */
function stateOf(name, { selected, twins, matches }) {
  if (!name) return "";
  const hit = matches?.has(name) ? "tf-hit " : "";
  return hit + (name === selected ? "tf-current" : twins.has(name) ? "tf-twin" : "");
}

/** @param {string} name @param {Context} context @returns {HTMLElement} */
function valueName(name, { values, changes, twins }) {
  const value = values[name];
  const change = changes.get(name);
  const op = value.op.replace(/^aten\.(\w+).*$/, "$1");
  return h(
    "span",
    { class: "tf-tree-value", title: [`${name} = ${value.op}`, value.type, change && CHANGES[change], value.lines.length > 0 && `one kernel for lines:\n${value.lines.map(([text, share]) => `${text || "no line of the program"} ${percent(share, 1)}`).join("\n")}`].filter(Boolean).join("\n") },
    h("span", { class: `tf-tree-glyph${change ? ` tf-${KINDS[change]}` : ""}`, "aria-label": change ? CHANGES[change] : null, role: change ? "img" : null }, change ? GLYPHS[change] : ""),
    twins.has(name) && h("span", { class: "tf-tree-twin", role: "img", "aria-label": "twin" }, "⇄"),
    h("code", null, name),
    h("span", { class: value.kernel ? "tf-tree-op tf-tree-kernel" : "tf-tree-op" }, op),
  );
}

/** @param {number} ratio */
function times(ratio) {
  return ratio > 99 ? "—" : `${ratio.toFixed(1)}×`;
}
