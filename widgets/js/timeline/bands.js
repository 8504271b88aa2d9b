// The rows of the timeline: where each stands, and what is at a point, in CSS pixels. It needs no DOM.

/** @typedef {import("./events.js").Program} Program */
/** @typedef {import("./memory.js").Profile} Profile */

/** One program with its memory; `number` is its place, 0 above and 1 below, `name` what it is called, `title` that and its time. @typedef {{ program: Program, memory: Memory, profile: Profile | null, measuredPeak: number | null, number: number, name: string, title: string }} Shown */
/** One event of one program. @typedef {{ number: number, event: number }} Cursor */
/** @typedef {{ y: number, height: number }} Band */
/** @typedef {{ overview: Band, ruler: Band, rows: { title: Band, lanes: Band[], memory: Band }[], gutter: number, height: number }} Layout */

const OVERVIEW = 26;
const RULER = 20;
const TITLE = 22;
const LANE = 22;
const MEMORY = [44, 130];
export const GAP = 3;
/** Width of one character of the canvas's font. */
export const CHARACTER = 6.1;

/** Rows one below another; the memory takes what is left of `height`, within bounds. @param {Shown[]} shown @param {number} height @returns {Layout} */
export function arranged(shown, height) {
  const fixed = shown.reduce((sum, { program }) => sum + TITLE + program.lanes.length * (LANE + GAP) + GAP * 3, OVERVIEW + RULER);
  const memory = Math.min(MEMORY[1], Math.max(MEMORY[0], Math.floor((height - fixed) / shown.length)));
  let y = OVERVIEW + RULER;
  const take = (/** @type {number} */ size, gap = GAP) => {
    const band = { y, height: size };
    y += size + gap;
    return band;
  };
  const rows = shown.map((one) => ({ title: take(TITLE, 0), lanes: one.program.lanes.map(() => take(LANE)), memory: take(one.memory.ops.length > 0 ? memory : 0, GAP * 3) }));
  const longest = Math.max(8, ...shown.flatMap(({ program }) => program.lanes.map((lane) => lane.name.length)));
  return { overview: { y: 0, height: OVERVIEW }, ruler: { y: OVERVIEW, height: RULER }, rows, gutter: Math.min(124, Math.ceil(longest * CHARACTER) + 12), height: y };
}

/** The bytes at the top of every memory band, which share a scale. @param {Shown[]} shown */
export const mostBytes = (shown) => Math.max(...shown.flatMap(({ memory, measuredPeak }) => [memory.peak, measuredPeak ?? 0])) * 1.12 || 1;

/** What is at a height: a lane has its number, everything else -1. @param {Layout} layout @param {number} y @returns {{ part: "overview" | "lane" | "memory" | "", number: number, lane: number }} */
export function under(layout, y) {
  const within = (/** @type {Band} */ band) => y >= band.y && y < band.y + band.height;
  if (within(layout.overview)) return { part: "overview", number: -1, lane: -1 };
  for (const [number, row] of layout.rows.entries()) {
    const lane = row.lanes.findIndex(within);
    if (lane >= 0) return { part: "lane", number, lane };
    if (within(row.memory)) return { part: "memory", number, lane: -1 };
  }
  return { part: "", number: -1, lane: -1 };
}
