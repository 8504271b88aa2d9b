// The pointer and the keyboard on the timeline's canvas.

import { inside, moved, showing, zoomed } from "./axis.js";
import { under } from "./bands.js";
import { first, nearest } from "./events.js";
import { highest } from "./memory.js";
import { eventTip, memoryTip } from "./readout.js";

/** @typedef {import("./axis.js").Window} Window @typedef {import("./bands.js").Cursor} Cursor */

/**
 * What the pointer and the keyboard act on: what is painted, and what can be asked of it.
 * @typedef {import("./lanes.js").Scene & {
 *   act: Act, view?: View, causes: Record<string, string>, width: number, layout: import("./bands.js").Layout, measuring: boolean,
 *   dom: { canvas: HTMLCanvasElement, tip: HTMLElement }, toggleMeasuring: () => void, speakRange: () => void, schedule: () => void,
 *   look: (window: Window) => void, measure: (range: Window | null) => void, choose: (cursor: Cursor) => void,
 *   showTip: (content: Node[], x: number, y: number) => void }} Target
 */

// Of pixels: less is a click, not a drag; and how far from a narrow event or a mark the pointer may be.
const CLICK = 4;
const NEAR = 4;
const MARK = 8;

/**
 * Listen to both. What comes back are the axis' pixels, and zooming as the buttons ask for it.
 * @param {Target} panel
 */
export function gestures(panel) {
  const { canvas, tip } = panel.dom;
  /** @type {{ x: number, mode: "range" | "pan" | "overview", window: Window, time: number, moved: boolean } | null} */
  let drag = null;
  /** Where measuring by keyboard began. @type {Cursor | null} */
  let anchor = null;
  const gutter = () => panel.layout.gutter;
  const plot = () => Math.max(1, panel.width - gutter());
  /** The length of a pixel in µs. */
  const pixel = () => (panel.window.to - panel.window.from) / plot();
  canvas.onpointerdown = onDown;
  canvas.onpointermove = onMove;
  canvas.onpointerup = onUp;
  canvas.onpointercancel = () => (drag = null);
  canvas.onpointerleave = untip;
  canvas.onkeydown = onKey;
  canvas.addEventListener("wheel", onWheel, { passive: false });
  /** Other programs are shown: what was begun on events of the old ones has no meaning. */
  const forget = () => {
    drag = null;
    anchor = null;
  };
  return { xOf, zoom, forget };

  /** @param {number} x */
  function timeAt(x) {
    return panel.window.from + (x - gutter()) * pixel();
  }

  /** @param {number} time */
  function xOf(time) {
    return gutter() + (time - panel.window.from) / pixel();
  }

  /** @param {number} factor @param {number} [at] default: the event that the keyboard is on if it is seen, else the middle */
  function zoom(factor, at) {
    const { window, span, cursor, shown } = panel;
    const start = cursor ? shown[cursor.number].program.columns.start[cursor.event] : NaN;
    const middle = start >= window.from && start <= window.to ? start : (window.from + window.to) / 2;
    panel.look(zoomed(window, factor, at ?? middle, span));
  }

  // --- pointer -------------------------------------------------------------------------------------------------------

  /** @param {PointerEvent} event */
  function onDown(event) {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    untip();
    const { part } = under(panel.layout, event.offsetY);
    const mode = part === "overview" ? "overview" : event.shiftKey || panel.measuring ? "range" : "pan";
    drag = { x: event.offsetX, mode, window: panel.window, time: timeAt(event.offsetX), moved: false };
    if (mode === "overview") centre(event.offsetX);
  }

  /** @param {PointerEvent} event */
  function onMove(event) {
    if (!drag) return point(event.offsetX, event.offsetY);
    drag.moved ||= Math.abs(event.offsetX - drag.x) >= CLICK;
    if (!drag.moved) return;
    if (drag.mode === "overview") return centre(event.offsetX);
    if (drag.mode === "pan") return panel.look(moved(drag.window, (drag.x - event.offsetX) * pixel(), panel.span));
    const time = Math.min(Math.max(timeAt(event.offsetX), panel.window.from), panel.window.to);
    panel.measure({ from: Math.min(drag.time, time), to: Math.max(drag.time, time) });
  }

  /** @param {PointerEvent} event */
  function onUp(event) {
    const ended = drag;
    drag = null;
    if (ended?.mode === "range" && ended.moved) panel.speakRange();
    if (!ended || ended.moved || ended.mode === "overview") return;
    const hit = hitAt(event.offsetX, event.offsetY);
    if (hit?.event !== undefined) panel.choose({ number: hit.number, event: hit.event });
    else if (hit) panel.act.select(hit.value);
  }

  /** @param {WheelEvent} event */
  function onWheel(event) {
    const across = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    const isZoom = event.ctrlKey || event.metaKey;
    // A plain wheel scrolls the notebook, as it does everywhere else.
    if (!isZoom && !event.shiftKey && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return;
    event.preventDefault();
    if (isZoom) zoom(Math.exp(Math.min(1, Math.max(-1, event.deltaY / 200))), timeAt(Math.max(event.offsetX, gutter())));
    else panel.look(moved(panel.window, across * pixel(), panel.span));
  }

  /** @param {number} x of the overview */
  function centre(x) {
    const { window, span } = panel;
    const middle = ((x - gutter()) / plot()) * span;
    const half = (window.to - window.from) / 2;
    panel.look(inside({ from: middle - half, to: middle + half }, span));
  }

  /** The event, or the op of the memory, at a point. @param {number} x @param {number} y */
  function hitAt(x, y) {
    if (x < gutter()) return null;
    const { part, number, lane } = under(panel.layout, y);
    const shown = panel.shown[number];
    const time = timeAt(x);
    if (part === "lane") {
      const event = nearest(shown.program, shown.program.lanes[lane], time, NEAR * pixel());
      return event < 0 ? null : { number, event, value: "" };
    }
    if (part !== "memory" || !shown.profile) return null;
    const { profile, memory } = shown;
    const peak = profile.ops.indexOf(memory.at);
    const isPeak = Math.abs(xOf(profile.at[peak]) - x) <= MARK;
    const op = isPeak ? peak : highest(profile, time, time + pixel());
    return op < 0 ? null : { number, op, value: profile.ops[op] };
  }

  /** @param {number} x @param {number} y */
  function point(x, y) {
    const hit = hitAt(x, y);
    panel.hover = x >= gutter() ? timeAt(x) : null;
    panel.schedule();
    canvas.style.cursor = hit ? "pointer" : "";
    if (!hit) return hideTip();
    const shown = panel.shown[hit.number];
    const content = hit.event === undefined ? memoryTip(shown, hit.op) : eventTip(shown, hit.event, panel.view?.payload.values ?? {}, panel.causes);
    panel.showTip(content, x, y);
  }

  function hideTip() {
    tip.hidden = true;
  }

  function untip() {
    panel.hover = null;
    panel.schedule();
    hideTip();
  }

  // --- keyboard ------------------------------------------------------------------------------------------------------

  /** @param {KeyboardEvent} event */
  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const page = 0.9 * (panel.window.to - panel.window.from);
    /** @type {Record<string, () => void>} */
    const actions = {
      "+": () => zoom(1 / 2),
      "=": () => zoom(1 / 2),
      "-": () => zoom(2),
      "0": () => panel.look({ from: 0, to: panel.span }),
      ArrowRight: () => along(1, event.shiftKey),
      ArrowLeft: () => along(-1, event.shiftKey),
      ArrowDown: () => across(1),
      ArrowUp: () => across(-1),
      Home: () => toEnd(0),
      End: () => toEnd(-1),
      PageDown: () => panel.look(moved(panel.window, page, panel.span)),
      PageUp: () => panel.look(moved(panel.window, -page, panel.span)),
      Escape: () => escape(),
    };
    const action = Object.hasOwn(actions, event.key) ? actions[event.key] : null;
    if (!action) return;
    event.preventDefault();
    action();
  }

  function escape() {
    anchor = null;
    panel.measure(null);
    if (panel.measuring) panel.toggleMeasuring();
  }

  /** To the event before or after; without one, pan. @param {number} by @param {boolean} isRange */
  function along(by, isRange) {
    const extends_ = isRange || panel.measuring;
    if (!panel.cursor && !extends_) return panel.look(moved(panel.window, by * 0.1 * (panel.window.to - panel.window.from), panel.span));
    const cursor = panel.cursor ?? inMiddle(0, 0);
    if (!cursor) return;
    anchor = extends_ ? (anchor ?? cursor) : null;
    const { at } = laneOf(cursor);
    const place = first(at.length, (i) => at[i] >= cursor.event) + by;
    const next = { number: cursor.number, event: at[Math.min(Math.max(place, 0), at.length - 1)] };
    if (anchor) panel.range = around(anchor, next);
    go(next);
    if (anchor) panel.speakRange();
  }

  /** To the lane above or below, those without an event left out. @param {number} by */
  function across(by) {
    const lanes = panel.shown.flatMap(({ program, number }) => program.lanes.map((lane, i) => ({ number, lane: i, count: lane.at.length }))).filter(({ count }) => count > 0);
    if (lanes.length === 0) return;
    const { cursor } = panel;
    const at = cursor ? lanes.findIndex(({ number, lane }) => number === cursor.number && lane === laneNumber(cursor)) : -1;
    const next = lanes[cursor ? Math.min(Math.max(at + by, 0), lanes.length - 1) : 0];
    anchor = null;
    go(inMiddle(next.number, next.lane));
  }

  /** @param {0 | -1} end */
  function toEnd(end) {
    const cursor = panel.cursor ?? inMiddle(0, 0);
    if (!cursor) return;
    const { at } = laneOf(cursor);
    go({ number: cursor.number, event: at[end === 0 ? 0 : at.length - 1] });
  }

  /** @param {Cursor | null} cursor */
  function go(cursor) {
    if (!cursor) return;
    const { from, to } = around(cursor, cursor);
    panel.look(showing(panel.window, from, to, panel.span));
    panel.choose(cursor);
  }

  /** The event of a lane nearest to the one that the keyboard is on, or to the middle of the window. @param {number} number @param {number} lane @returns {Cursor | null} */
  function inMiddle(number, lane) {
    const { from, to } = panel.cursor ? around(panel.cursor, panel.cursor) : panel.window;
    const { program } = panel.shown[number];
    // Of a program that did nothing there is no lane.
    const event = lane < program.lanes.length ? nearest(program, program.lanes[lane], (from + to) / 2, Infinity) : -1;
    return event < 0 ? null : { number, event };
  }

  /** @param {Cursor} cursor */
  function laneNumber({ number, event }) {
    return panel.shown[number].program.columns.lane[event];
  }

  /** @param {Cursor} cursor */
  function laneOf(cursor) {
    return panel.shown[cursor.number].program.lanes[laneNumber(cursor)];
  }

  /** From the start of the earlier to the end of the later. @param {Cursor} one @param {Cursor} other */
  function around(one, other) {
    const ends = [one, other].map(({ number, event }) => {
      const { start, duration } = panel.shown[number].program.columns;
      return { from: start[event], to: start[event] + duration[event] };
    });
    return { from: Math.min(ends[0].from, ends[1].from), to: Math.max(ends[0].to, ends[1].to) };
  }
}
