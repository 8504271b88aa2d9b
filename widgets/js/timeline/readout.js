// The timeline in words: what a range holds, what the pointer is over, and what is alive at the peak.

import { formatBytes, h } from "../parts/dom.js";
import { chip } from "../parts/widgets.js";
import { duration, percent } from "./axis.js";
import { atWork, KINDS, sums } from "./events.js";
import { gapTip } from "./idle.js";
import { labelOf } from "./lanes.js";
import { aliveAt, PURPOSES } from "./memory.js";

/** @typedef {import("./axis.js").Window} Window */
/** @typedef {import("./bands.js").Shown} Shown */

const TOP = 4;

/** The colours and glyphs of what there is. @param {Shown[]} shown */
export function legend(shown) {
  const there = KINDS.filter((_, kind) => shown.some(({ program }) => program.kinds.includes(kind)));
  return there.map(({ id, label, glyph }) => h("span", { class: `tf-kind tf-kind-${id}` }, h("i", { "aria-hidden": "true" }, glyph), label));
}

/** What each lane did in a range. @param {Shown[]} shown @param {Window} range @param {() => void} clear */
export function rangeTable(shown, range, clear) {
  const length = range.to - range.from;
  const rows = shown.flatMap(({ program, name, number }) =>
    program.lanes.flatMap((lane) => {
      const { busy, gaps, longest, count, top } = sums(program, lane, range.from, range.to);
      if (count === 0) return [];
      const most = top.slice(0, TOP).map((one) => `${plain(one.name)} ${duration(one.time)}${one.count > 1 ? ` ×${one.count}` : ""}`).join(" · ");
      return h(
        "tr",
        null,
        h("th", { scope: "row" }, h("abbr", { title: name }, "AB"[number]), ` · ${lane.name}`),
        h("td", { class: "tf-right" }, count),
        h("td", { class: "tf-right" }, `${duration(busy)} · ${percent(busy, length)}`),
        h("td", { class: "tf-right" }, gaps === 0 ? "none" : `${gaps} · longest ${duration(longest)}`),
        h("td", { title: most }, most),
      );
    }),
  );
  return h(
    "div",
    { class: "tf-range", "data-testid": "tf-range" },
    h("b", { "data-testid": "tf-range-length" }, duration(length)),
    h("span", { class: "tf-note" }, ` measured, from ${duration(range.from)} to ${duration(range.to)} `),
    h("button", { class: "tf-chip", onclick: clear, "aria-label": "clear the measured range", "data-testid": "tf-range-clear" }, "×"),
    h(
      "table",
      { class: "tf-table" },
      h("thead", null, h("tr", null, ["lane", "events", "busy", "gaps", "most time"].map((title, i) => h("th", { scope: "col", class: i > 0 && i < 4 ? "tf-right" : null }, title)))),
      h("tbody", null, rows),
    ),
  );
}

/** An operator without what all of them have in common. @param {string} name */
function plain(name) {
  return name.replace(/^aten\./, "").replace(/\.default$/, "");
}

/** One event in a line, for those who hear it too. @param {Shown} shown @param {number} event */
export function sentence({ program, name }, event) {
  const { columns, lanes, names, ops } = program;
  const lane = lanes[columns.lane[event]];
  const called = [...new Set([labelOf(program, event), plain(names[ops[event]])])];
  return `${called.join(", ")}, ${duration(columns.duration[event])} at ${duration(columns.start[event])}, ${lane.name}, ${name}`;
}

/** @param {Shown[]} shown @param {Window} range */
export function rangeSentence(shown, range) {
  const length = range.to - range.from;
  const each = shown.flatMap(({ program, name }) => program.lanes.map((lane) => `${name}, ${lane.name}: busy ${percent(sums(program, lane, range.from, range.to).busy, length)}`));
  return `${duration(length)} measured. ${each.join(". ")}.`;
}

/** What the pointer is over. @param {Shown} shown @param {number} event @param {Record<string, Value>} values @param {Record<string, string>} causes */
export function eventTip({ program, name }, event, values, causes) {
  const { columns, lanes, names, ops } = program;
  if (lanes[columns.lane[event]].kind === "idle") return gapTip(program, event, causes);
  const own = columns.name[event];
  const label = labelOf(program, event);
  const value = columns.value[event] > 0 ? values[label] : undefined;
  return [
    h("b", null, label),
    h("span", null, `${KINDS[program.kinds[event]].glyph} ${plain(names[ops[event]])}`),
    own !== ops[event] && h("code", null, names[own]),
    h("span", null, `${duration(columns.duration[event])} at ${duration(columns.start[event])}`),
    columns.delay[event] >= 0 && h("span", null, `launched ${duration(columns.delay[event])} before it started`),
    h("span", { class: "tf-note" }, `${name} · ${lanes[columns.lane[event]].name}${value ? ` · ${value.phase}` : ""}`),
    value?.type && h("code", null, value.type),
    value?.module && h("span", { class: "tf-note" }, `${value.module}: ${value.module_type}`),
    value?.source && h("code", null, value.source),
  ].filter((part) => part instanceof Node);
}

/** @param {Shown} shown @param {number} op index into the profile */
export function memoryTip({ profile, memory, name }, op) {
  if (!profile) return [];
  const [value, bytes] = [profile.ops[op], profile.live[op]];
  const share = `${percent(bytes, memory.peak)} of the peak`;
  const purposes = PURPOSES.map((one, at) => profile.purposes[at][op] > 0 && purpose(one, formatBytes(profile.purposes[at][op]))).filter((one) => one !== false);
  const largest = aliveAt(memory, op).slice(0, TOP).map(([made, count]) => h("span", null, h("code", null, made), ` ${formatBytes(count)}`));
  return [h("b", null, formatBytes(bytes)), h("span", null, `alive while ${value} runs`), ...purposes, ...largest, h("span", { class: "tf-note" }, `${name} · ${share} · static`)];
}

/** A colour and what it stands for. @param {{ id: string, label: string }} purpose @param {string} [bytes] */
function purpose({ id, label }, bytes = "") {
  return h("span", { class: "tf-purpose" }, h("i", { class: `tf-purpose-${id}`, "aria-hidden": "true" }), label, bytes && h("b", null, bytes));
}

/** The colours of the memory that there is. @param {Shown[]} shown */
export function purposes(shown) {
  const there = PURPOSES.filter((_, at) => shown.some(({ profile }) => profile?.purposes[at].some((bytes) => bytes > 0)));
  return there.length > 0 ? [h("span", null, "memory:"), ...there.map((one) => purpose(one))] : [];
}

/** What is saved for the backward, before and after, why and where. @param {Payload} payload */
export function savedTables({ memory: { reasons, modules } }) {
  if (reasons.length === 0) return [h("p", { class: "tf-note" }, "Nothing is saved for a backward.")];
  const [total, was] = [2, 1].map((at) => reasons.reduce((sum, row) => sum + Number(row[at]), 0));
  const right = { class: "tf-right" };
  const row = (/** @type {[string, number, number, string?]} */ [name, before, after, sentence]) =>
    h("tr", null, h("th", { scope: "row" }, name), h("td", right, before === after ? "" : `${formatBytes(before)} →`), h("td", right, formatBytes(after)), h("td", right, percent(after, total)), h("td", { class: "tf-note" }, sentence));
  const table = (/** @type {string} */ title, /** @type {[string, number, number, string?][]} */ groups) =>
    h("table", { class: "tf-table tf-saved" }, h("thead", null, h("tr", null, h("th", { scope: "col" }, title), ["before", "bytes", "share"].map((one) => h("th", { scope: "col", ...right }, one)), h("th", { scope: "col" }, groups === reasons ? "why" : ""))), h("tbody", null, groups.map(row)));
  return [
    h("p", null, h("b", null, "Saved for the backward"), ` ${was === total ? "" : `${formatBytes(was)} → `}${formatBytes(total)}`, h("span", { class: "tf-note" }, " static, from the traces")),
    table("by reason", reasons),
    table("by module", modules),
  ];
}

/** The largest storages that are alive at the peak. @param {Shown[]} shown @param {Act} act */
export function alive(shown, act) {
  return shown.filter(({ memory }) => memory.ops.length > 0).map(({ memory, name, measuredPeak, profile }) => {
    const [[, largest] = ["", 1]] = memory.alive;
    const rest = memory.peak - memory.alive.reduce((sum, [, bytes]) => sum + bytes, 0);
    return h(
      "div",
      { class: "tf-alive" },
      h("p", null, h("b", null, name), ` ${formatBytes(memory.peak)} at `, memory.at && chip(memory.at, act)),
      profile && h("p", { class: "tf-purposes" }, PURPOSES.map((one, at) => profile.purposes[at][memory.ops.indexOf(memory.at)] > 0 && purpose(one, formatBytes(profile.purposes[at][memory.ops.indexOf(memory.at)]))).filter((one) => one !== false)),
      h("p", { class: "tf-note" }, measuredPeak === null ? "Static, from the trace; not measured." : `Static, from the trace; measured on the GPU: ${formatBytes(measuredPeak)}.`),
      h("ol", null, memory.alive.map(([value, bytes]) => h("li", null, bar(bytes / (largest || 1)), chip(value, act), h("span", null, formatBytes(bytes))))),
      rest > 0 && h("p", { class: "tf-note" }, `and ${formatBytes(rest)} of smaller ones`),
    );
  });
}

/** @param {number} share */
function bar(share) {
  const fill = h("b", null);
  fill.style.width = `${100 * share}%`;
  return h("i", { "aria-hidden": "true" }, fill);
}

/** The selected value's time in each program. @param {Shown[]} shown @param {number[][]} events of the value, per program */
export function times(shown, events) {
  return shown
    .map(({ program, name }, i) => {
      if (events[i].length === 0) return `${name}: no event`;
      return `${name}: ${duration(atWork(program, events[i]).reduce((sum, event) => sum + program.columns.duration[event], 0))}`;
    })
    .join(" · ");
}
