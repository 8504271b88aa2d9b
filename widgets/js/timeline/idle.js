// Idle time in words: what one gap is, and the sums by cause.

import { h } from "../parts/dom.js";
import { duration, percent } from "./axis.js";
import { KINDS, PAUSE } from "./events.js";

/** @typedef {import("./bands.js").Shown} Shown */
/** @typedef {import("./events.js").Program} Program */

/** The cause of a gap, as its name begins. @param {string} name */
export const causeOf = (name) => name.split(": ")[0];

/** What the pointer is over. @param {Program} program @param {number} event @param {Record<string, string>} causes */
export function gapTip({ columns, lanes, names, values }, event, causes) {
  const [name, next] = [names[columns.name[event]], columns.value[event]];
  return [
    h("b", null, name),
    h("span", null, causes[causeOf(name)] ?? ""),
    h("span", null, `${duration(columns.duration[event])} at ${duration(columns.start[event])}`),
    h("span", { class: "tf-note" }, lanes[columns.lane[event]].name, next > 0 ? `, until ${values[next - 1]}` : ""),
  ];
}

/**
 * The idle time of each GPU by cause, the longest first; a cause's button shows its longest gap.
 * @param {Shown[]} shown @param {Record<string, string>} causes @param {(number: number, event: number) => void} show
 */
export function idleTable(shown, causes, show) {
  const rows = shown.flatMap(({ program, name, number }) =>
    program.lanes
      .filter((lane) => lane.kind === "idle")
      .flatMap((lane) =>
        byCause(program, lane).map(({ cause, time, count, longest }) =>
          h(
            "tr",
            null,
            h("th", { scope: "row" }, h("abbr", { title: name }, "AB"[number]), ` · ${lane.name}`),
            h("td", null, h("button", { class: "tf-chip", title: "show the longest", onclick: () => show(number, longest) }, cause)),
            h("td", { class: "tf-right" }, `${duration(time)} · ${percent(time, program.span)}`),
            h("td", { class: "tf-right" }, count),
            h("td", { class: "tf-right" }, duration(program.columns.duration[longest])),
            h("td", null, causes[cause]),
          ),
        ),
      ),
  );
  const titles = ["lane", "cause", "time", "gaps", "longest", ""].map((title, i) => h("th", { scope: "col", class: i > 1 && i < 5 ? "tf-right" : null }, title));
  return h("table", { class: "tf-table" }, h("thead", null, h("tr", null, titles)), h("tbody", null, rows));
}

/** What the GPU of the last program with idle time was idle for, and the cause of most of it; "" without any. @param {Shown[]} shown */
export function idleSentence(shown) {
  const found = shown.flatMap(({ program, name }) => program.lanes.filter(({ kind }) => kind === "idle").map((lane) => ({ program, name, causes: byCause(program, lane) })));
  const last = found.at(-1);
  if (!last) return "";
  const total = last.causes.reduce((sum, { time }) => sum + time, 0);
  const most = last.causes.find(({ cause }) => !KINDS[PAUSE].names.test(cause)) ?? last.causes[0];
  return `GPU idle for ${percent(total, last.program.span)} of ${last.name}, ${duration(most.time)} of it by: ${most.cause}`;
}

/** @param {Program} program @param {import("./events.js").Lane} lane */
export function byCause({ columns, names }, lane) {
  /** @type {Map<string, { cause: string, time: number, count: number, longest: number }>} */
  const found = new Map();
  for (const event of lane.at) {
    const cause = causeOf(names[columns.name[event]]);
    const one = found.get(cause) ?? { cause, time: 0, count: 0, longest: event };
    one.time += columns.duration[event];
    one.count += 1;
    if (columns.duration[event] > columns.duration[one.longest]) one.longest = event;
    found.set(cause, one);
  }
  return [...found.values()].sort((a, b) => b.time - a.time);
}
