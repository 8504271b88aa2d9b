// The painting of the timeline on a canvas: lanes, memory, overview and marks.

import { formatBytes } from "../parts/dom.js";
import { hatch } from "../parts/theme.js";
import { onAxis, ticks } from "./axis.js";
import { CHARACTER, GAP, mostBytes } from "./bands.js";
import { KINDS, spans } from "./events.js";
import { outline, PURPOSES } from "./memory.js";

/** @typedef {import("./axis.js").Window} Window @typedef {import("./events.js").Program} Program @typedef {import("./memory.js").Profile} Profile */
/** @typedef {import("./bands.js").Shown} Shown @typedef {import("./bands.js").Band} Band @typedef {import("./bands.js").Layout} Layout */

/**
 * What is painted: of the marks, `events` are those of the selected value and `found` those that a search found, per program.
 * @typedef {object} Scene
 * @property {Window} window
 * @property {number} span
 * @property {Shown[]} shown
 * @property {Float64Array[]} overviews shares of busy time per pixel
 * @property {number[][]} events
 * @property {(Uint8Array | null)[]} found
 * @property {import("./bands.js").Cursor | null} cursor
 * @property {Window | null} range
 * @property {number | null} hover
 */

const FONT = "10px ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace";

/**
 * One frame.
 * @param {CanvasRenderingContext2D} context @param {Layout} layout @param {number} width @param {Scene} scene
 * @param {Record<string, string>} colours
 */
export function paint(context, layout, width, { window, span, shown, overviews, events, found, cursor, range, hover }, colours) {
  const plot = width - layout.gutter;
  context.font = FONT;
  context.textBaseline = "middle";
  context.fillStyle = colours.bg;
  context.fillRect(0, 0, width, layout.height);
  drawRuler();
  const most = mostBytes(shown);
  for (const one of shown) {
    const row = layout.rows[one.number];
    drawTitle(one, row.title);
    one.program.lanes.forEach((_, i) => drawLane(one, i, row.lanes[i]));
    drawMemory(one, row.memory, most, one === shown.at(-1));
  }
  drawOverview();
  if (range) drawRange(range);
  if (hover !== null) drawLine(hover, colours.lineStrong);

  /** @param {number} time */
  function xOf(time) {
    return layout.gutter + ((time - window.from) / (window.to - window.from)) * plot;
  }

  function drawRuler() {
    const { step, at } = ticks(window, plot, 92);
    const { y, height } = layout.ruler;
    context.textAlign = "left";
    for (const time of at) {
      const x = Math.round(xOf(time)) + 0.5;
      context.fillStyle = colours.line;
      context.fillRect(x - 0.5, y + 4, 1, layout.height);
      context.fillStyle = colours.soft;
      context.fillText(onAxis(time, step, span), x + 4, y + height / 2 + 2);
    }
  }

  /** @param {Shown} one @param {Band} band */
  function drawTitle({ program, title, number }, band) {
    context.fillStyle = colours.bg;
    context.fillRect(0, band.y, width, band.height);
    context.fillStyle = colours.text;
    context.font = FONT.replace("10px", "600 11px");
    context.textAlign = "left";
    context.fillText(`${"AB"[number]}  ${title}`, 8, band.y + band.height / 2 + 1);
    context.font = FONT;
    const clock = program.lanes.find((lane) => !Number.isNaN(lane.backward));
    const x = clock ? xOf(clock.backward) : NaN;
    if (!(x > layout.gutter && x < width)) return;
    // Each word is left out where it would run into the title, or off the edge.
    const taken = 24 + (title.length + 3) * 6.8;
    context.fillStyle = colours.soft;
    context.textAlign = "right";
    if (x - 58 > taken) context.fillText("forward ", x, band.y + band.height / 2 + 1);
    context.textAlign = "left";
    if (x > taken && x + 60 < width) context.fillText("│ backward", x - 3, band.y + band.height / 2 + 1);
    const late = clock && !Number.isNaN(clock.update) ? xOf(clock.update) : NaN;
    if (late > Math.max(taken, x + 70) && late + 50 < width) context.fillText("│ update", late - 3, band.y + band.height / 2 + 1);
  }

  /** @param {Shown} one @param {number} index @param {Band} band */
  function drawLane({ program, number }, index, band) {
    const lane = program.lanes[index];
    context.fillStyle = colours.sunken;
    context.fillRect(layout.gutter, band.y, plot, band.height);
    const y = band.y + 1;
    const height = band.height - 2;
    spans(program, lane, window, plot, found[number], (x, width, kind, share, event, faint) => {
      context.globalAlpha = (0.35 + 0.65 * share) * (faint ? 0.22 : 1);
      context.fillStyle = lane.kind === "idle" ? hatch(context, colours[KINDS[kind].colour]) : colours[KINDS[kind].colour];
      // The gap tells two events of one kind apart.
      context.fillRect(layout.gutter + x, y, width > 3 ? width - 1 : width, height);
      if (width < 10 || event < 0) return;
      context.globalAlpha = faint ? 0.5 : 1;
      context.fillStyle = faint || lane.kind === "idle" ? colours.text : colours.on;
      drawLabel(labelOf(program, event), KINDS[kind].glyph, layout.gutter + x, width - 1, y + height / 2 + 0.5, lane.kind === "idle");
    });
    context.globalAlpha = 1;
    drawName(lane.name, band, colours.soft);
    for (const time of [lane.backward, lane.update]) if (!Number.isNaN(time)) drawBoundary(time, band);
    for (const event of events[number]) if (program.columns.lane[event] === index) drawEmphasis(program, event, band, number);
  }

  /** As much of a label as there is room for; of the last resort, the glyph of its kind. @param {string} text @param {string} glyph @param {number} x @param {number} width @param {number} y @param {boolean} isStriped below it */
  function drawLabel(text, glyph, x, width, y, isStriped) {
    const room = Math.floor((width - 6) / CHARACTER);
    const shown = text.length <= room ? text : room >= 5 ? `${text.slice(0, room - 1)}…` : glyph;
    context.textAlign = "center";
    context.strokeStyle = colours.sunken;
    context.lineWidth = 4;
    if (isStriped) context.strokeText(shown, x + width / 2, y);
    context.fillText(shown, x + width / 2, y);
  }

  /** In the gutter. @param {string} text @param {Band} band @param {string} colour */
  function drawName(text, band, colour) {
    context.fillStyle = colours.bg;
    context.fillRect(0, band.y, layout.gutter, band.height);
    context.fillStyle = colour;
    context.textAlign = "left";
    const room = Math.floor((layout.gutter - 10) / CHARACTER);
    context.fillText(text.length > room ? `${text.slice(0, room - 1)}…` : text, 8, band.y + band.height / 2 + 0.5);
  }

  /** Where a phase begins. @param {number} time @param {Band} band */
  function drawBoundary(time, band) {
    const x = xOf(time);
    if (x < layout.gutter || x > width) return;
    context.fillStyle = colours.text;
    context.fillRect(x - 1, band.y - GAP, 1.5, band.height + 2 * GAP);
  }

  /** @param {Program} program @param {number} event @param {Band} band @param {number} number */
  function drawEmphasis(program, event, band, number) {
    const left = Math.max(layout.gutter, xOf(program.columns.start[event]));
    const right = Math.min(width, xOf(program.columns.start[event] + program.columns.duration[event]));
    if (right < layout.gutter || left > width) return;
    const isCursor = cursor?.number === number && cursor.event === event;
    context.strokeStyle = colours.text;
    context.lineWidth = isCursor ? 2.5 : 1.5;
    context.strokeRect(left - 1.5, band.y - 0.5, Math.max(2, right - left) + 2, band.height + 1);
    // A mark that is seen where the event itself is narrower than a pixel.
    triangle((left + right) / 2, band.y - 2, isCursor ? 5 : 4, colours.text);
  }

  /** Its tip at x, y. @param {number} x @param {number} y @param {number} size @param {string} colour */
  function triangle(x, y, size, colour) {
    context.fillStyle = colour;
    context.beginPath();
    context.moveTo(x, y + 1);
    context.lineTo(x - size, y - size);
    context.lineTo(x + size, y - size);
    context.fill();
  }

  // --- memory, overview, marks ---------------------------------------------------------------------------------------

  /** @param {Shown} one @param {Band} band @param {number} most bytes at the top @param {boolean} isLast */
  function drawMemory({ memory, profile, measuredPeak }, band, most, isLast) {
    if (memory.ops.length === 0) return;
    context.fillStyle = colours.lineStrong;
    context.fillRect(layout.gutter, band.y + band.height - 1, plot, 1);
    drawName("memory", { y: band.y, height: 16 }, colours.soft);
    drawName("static", { y: band.y + 16, height: 12 }, colours.soft);
    const level = (/** @type {number} */ bytes) => band.y + band.height - 1 - (bytes / most) * (band.height - 1);
    if (profile) drawArea(profile, level);
    if (measuredPeak !== null) drawLevel(`measured peak ${formatBytes(measuredPeak)}`, level(measuredPeak));
    if (profile) drawPeak(memory, profile, level, isLast);
    if (profile) drawAgain(memory, profile, band);
  }

  /** Stacked by purpose, inputs below. @param {Profile} profile @param {(bytes: number) => number} level */
  function drawArea(profile, level) {
    const at = outline(profile, window, Math.max(1, Math.floor(plot)));
    const end = at.indexOf(-1);
    const count = end < 0 ? at.length : end;
    const below = new Float64Array(count);
    PURPOSES.forEach(({ colour }, purpose) => {
      const column = profile.purposes[purpose];
      context.fillStyle = colours[colour];
      context.globalAlpha = 0.75;
      context.beginPath();
      for (let x = 0; x < count; x += 1) {
        const bytes = column[at[x]];
        if (bytes > 0) context.rect(layout.gutter + x, level(below[x] + bytes), 1, level(below[x]) - level(below[x] + bytes));
        below[x] += bytes;
      }
      context.fill();
    });
    context.globalAlpha = 1;
  }

  /** A tick where an op computes again what the forward computed, one to a pixel. @param {Memory} memory @param {Profile} profile @param {Band} band */
  function drawAgain({ again }, { at }, band) {
    context.fillStyle = colours.brand;
    let last = -1;
    for (const op of again) {
      const x = Math.round(xOf(at[op]));
      if (x < layout.gutter || x > width || x === last) continue;
      context.fillRect(x, band.y + band.height - 9, 3, 8);
      last = x;
    }
  }

  /** @param {string} text @param {number} y */
  function drawLevel(text, y) {
    context.strokeStyle = colours.warn;
    context.setLineDash([5, 4]);
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(layout.gutter, Math.round(y) + 0.5);
    context.lineTo(width, Math.round(y) + 0.5);
    context.stroke();
    context.setLineDash([]);
    written(text, layout.gutter + 6, y + 9, colours.warn);
  }

  /** @param {Memory} memory @param {Profile} profile @param {(bytes: number) => number} level @param {boolean} isLast */
  function drawPeak(memory, profile, level, isLast) {
    const x = xOf(profile.at[profile.ops.indexOf(memory.at)]);
    if (x < layout.gutter || x > width) return;
    const y = level(memory.peak);
    triangle(x, y - 1, 5, colours.brand);
    const text = `peak ${formatBytes(memory.peak)} · ${memory.at}`;
    const length = text.length * CHARACTER;
    // Above the last memory lies the line that is dragged, with words of its own: there the peak is named below it.
    written(text, x + 10 + length > width ? x - 10 - length : x + 9, isLast ? y + 12 : Math.max(y - 3, 0), colours.text);
  }

  /** Text that stays readable on whatever is below it. @param {string} text @param {number} x @param {number} y @param {string} colour */
  function written(text, x, y, colour) {
    context.textAlign = "left";
    context.strokeStyle = colours.bg;
    context.lineWidth = 3;
    context.lineJoin = "round";
    context.strokeText(text, x, y);
    context.fillStyle = colour;
    context.fillText(text, x, y);
  }

  /** How busy each program is over the whole axis, and what part of it the window shows. */
  function drawOverview() {
    const { y, height } = layout.overview;
    context.fillStyle = colours.sunken;
    context.fillRect(layout.gutter, y, plot, height);
    const each = (height - 4) / overviews.length;
    overviews.forEach((shares, number) => {
      const bottom = y + 2 + each * (number + 1) - 1;
      context.fillStyle = colours.soft;
      context.beginPath();
      shares.forEach((share, x) => context.rect(layout.gutter + x, bottom - share * (each - 2), 1, share * (each - 2)));
      context.fill();
    });
    drawName("overview", layout.overview, colours.soft);
    const left = layout.gutter + (window.from / span) * plot;
    const right = layout.gutter + (window.to / span) * plot;
    context.strokeStyle = colours.brand;
    context.lineWidth = 2;
    context.strokeRect(left + 1, y + 1, Math.max(3, right - left - 2), height - 2);
  }

  /** @param {Window} range */
  function drawRange({ from, to }) {
    const left = Math.max(layout.gutter, xOf(from));
    const right = Math.min(width, xOf(to));
    if (right < left) return;
    context.globalAlpha = 0.14;
    context.fillStyle = colours.brand;
    context.fillRect(left, layout.ruler.y, right - left, layout.height);
    context.globalAlpha = 1;
    drawLine(from, colours.brand);
    drawLine(to, colours.brand);
  }

  /** @param {number} time @param {string} colour */
  function drawLine(time, colour) {
    const x = Math.round(xOf(time)) + 0.5;
    if (x < layout.gutter || x > width) return;
    context.strokeStyle = colour;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(x, layout.ruler.y);
    context.lineTo(x, layout.height);
    context.stroke();
  }
}

/** @param {Program} program @param {number} event */
export function labelOf({ columns, names, values, lanes }, event) {
  if (lanes[columns.lane[event]].kind === "idle") return names[columns.name[event]];
  return columns.value[event] > 0 ? values[columns.value[event] - 1] : names[columns.name[event]];
}

/** Which events are of values that a search found. @param {Program} program @param {Set<string>} matches */
export function isFound({ values, columns }, matches) {
  const isMatch = [false, ...values.map((value) => matches.has(value))];
  return Uint8Array.from(columns.value, (value) => Number(isMatch[value]));
}
