// The Timeline tab: kernels and ops on lanes, the program before the passes above the one after them, and the memory below each.

import { h } from "../parts/dom.js";
import { colours, onTheme } from "../parts/theme.js";
import { chip } from "../parts/widgets.js";
import { duration, inside } from "./axis.js";
import { arranged, mostBytes } from "./bands.js";
import { controls, origin, parts, staleness } from "./bar.js";
import { MemoryLine } from "./budget.js";
import { atWork, eventsOf, measured, modelled, shares } from "./events.js";
import { gestures } from "./gestures.js";
import { idleSentence, idleTable } from "./idle.js";
import { isFound, paint } from "./lanes.js";
import { isOf, profile } from "./memory.js";
import { alive, legend, purposes, rangeSentence, rangeTable, savedTables, sentence, times } from "./readout.js";

/** @typedef {import("./axis.js").Window} Window */
/** @typedef {import("./bands.js").Shown} Shown */
/** @typedef {import("./bands.js").Cursor} Cursor */

const HINT = "Click an event to select its op. Drag pans, Ctrl+wheel zooms, Shift+drag measures.";
/** Those of `tracefuse.timeline.replayed`, as the view calls them: a measured one may be of another baseline than is pinned now. @type {Record<string, string>} */
const NAMES = { captured: "as captured", baseline: "pinned", optimised: "optimised", run: "the run" };
// The folded list, in pixels.
const BELOW = 36;

export class TimelinePanel {
  /** @param {Act} act */
  constructor(act) {
    this.act = act;
    /** What the reader chose; without a choice, what fits the clock of the view. @type {boolean | null} */
    this.chosen = null;
    /** @type {Shown[]} */
    this.shown = [];
    this.span = 1;
    /** @type {Window} */
    this.window = { from: 0, to: 1 };
    /** @type {Window | null} */
    this.range = null;
    /** The event that the keyboard is on. @type {Cursor | null} */
    this.cursor = null;
    /** The one that was shown last. @type {Cursor | null} */
    this.showing = null;
    /** The time under the pointer. @type {number | null} */
    this.hover = null;
    /** Whether dragging measures. */
    this.measuring = false;
    /** Of the selected value, per program. @type {number[][]} */
    this.events = [];
    /** @type {(Uint8Array | null)[]} */
    this.found = [];
    /** Those that `found` is of. @type {Set<string> | null | undefined} */
    this.matches = undefined;
    /** @type {Float64Array[]} */
    this.overviews = [];
    this.frame = 0;
    this.width = 1;
    this.layout = arranged([], 0);
    this.dom = parts();
    this.element = this.dom.element;
    this.line = new MemoryLine(act);
    this.dom.stage.append(this.line.element);
    Object.assign(this.dom.canvas, { locate: (/** @type {string} */ value, /** @type {number} */ number) => this.locate(value, number) });
    this.gestures = gestures(this);
    this.resized = new ResizeObserver(() => this.schedule());
    this.resized.observe(this.element);
    /** Resolved when they are next needed. @type {Record<string, string> | null} */
    this.colours = null;
    this.stopTheme = onTheme(() => {
      this.colours = null;
      this.schedule();
    });
  }

  destroy() {
    cancelAnimationFrame(this.frame);
    this.resized.disconnect();
    this.stopTheme();
  }

  // --- what is shown -------------------------------------------------------------------------------------------------

  /** @param {View} view */
  draw(view) {
    const isNew = view.payload !== this.view?.payload || view.timeline !== this.view?.timeline;
    this.view = view;
    if (isNew) this.load();
    this.drawBar(view);
  }

  /** The programs of the payload or of the timeline; the part of the axis that is seen stays if it is still there. */
  load() {
    const { payload } = /** @type {View} */ (this.view);
    const isAll = this.window.from === 0 && this.window.to === this.span;
    const { before, after } = payload.memory;
    this.shown = this.programs().map((program, number) => {
      const memory = number === 0 ? before : after;
      const name = NAMES[program.label];
      const title = `${name} · ${duration(program.span)}`;
      return { program, memory, profile: profile(program, memory), measuredPeak: payload.summary.measured_peak_bytes?.[number] ?? null, number, name, title };
    });
    this.span = Math.max(...this.shown.map(({ program }) => program.span)) || 1;
    this.window = isAll ? { from: 0, to: this.span } : inside(this.window, this.span);
    this.range = null;
    this.cursor = null;
    this.showing = null;
    this.gestures.forget();
    this.overviews = [];
    this.matches = undefined;
    this.dom.alive.replaceChildren(...alive(this.shown, this.act));
    this.dom.saved.replaceChildren(...savedTables(payload));
    this.dom.details.hidden = this.dom.alive.childElementCount === 0;
    this.dom.idle.replaceChildren(idleTable(this.shown, this.causes, (number, event) => this.showEvent({ number, event })));
    const said = idleSentence(this.shown);
    this.dom.gaps.hidden = said === "";
    /** @type {HTMLElement} */ (this.dom.gaps.firstElementChild).textContent = said;
  }

  /** What the causes of gaps mean. @returns {Record<string, string>} */
  get causes() {
    return this.view?.timeline?.causes ?? {};
  }

  /** Whether ops are laid end to end, as the clock has them: where it is of another device, or a replay is of other passes. */
  get wantsModelled() {
    const { payload, timeline } = /** @type {View} */ (this.view);
    if (this.chosen !== null || !timeline || !payload.clock) return this.chosen ?? false;
    const shown = timeline.programs.at(-1);
    return payload.clock.chosen !== "here" || !shown || !isOf(shown, payload.memory.after.ops);
  }

  programs() {
    const { payload, timeline } = /** @type {View} */ (this.view);
    if (timeline && !this.wantsModelled) return timeline.programs.map((program) => measured(program, payload.values, payload.clock?.replays[program.config]));
    const { before, after } = payload.memory;
    return [modelled(payload.baseline.is_pinned ? "baseline" : "captured", before.ops, payload.values, 0), modelled("optimised", after.ops, payload.values, 1)];
  }

  /** Whether what was measured are other programs than those of the payload. */
  get isStale() {
    return this.shown.some(({ program, memory }) => memory.ops.length > 0 && !isOf(program, memory.ops));
  }

  /** @param {View} view */
  drawBar(view) {
    const isMeasured = view.timeline !== null && !this.wantsModelled;
    const buttons = { measure: () => this.toggleMeasuring(), out: () => this.gestures.zoom(2), in: () => this.gestures.zoom(1 / 2), all: () => this.look({ from: 0, to: this.span }) };
    this.dom.bar.replaceChildren(
      ...origin(view, isMeasured, (wantsModelled) => this.changeSource(wantsModelled)),
      controls(buttons, this.measuring),
      h("span", { class: "tf-kinds" }, legend(this.shown), purposes(this.shown)),
      ...(isMeasured && this.isStale ? [staleness(view)] : []),
    );
  }

  /** @param {boolean} wantsModelled */
  changeSource(wantsModelled) {
    const view = /** @type {View} */ (this.view);
    this.chosen = wantsModelled;
    this.load();
    this.drawBar(view);
    this.mark(view);
    /** @type {HTMLElement} */ (this.dom.bar.querySelector("select")).focus();
  }

  toggleMeasuring() {
    this.measuring = !this.measuring;
    this.dom.bar.querySelector("[aria-pressed]")?.setAttribute("aria-pressed", String(this.measuring));
    this.dom.canvas.classList.toggle("tf-measuring", this.measuring);
  }

  /** @param {View} view */
  mark(view) {
    this.view = view;
    const { selected, matches } = view;
    this.events = this.shown.map(({ program }) => eventsOf(program, selected));
    if (matches !== this.matches) this.found = this.shown.map(({ program }) => matches && isFound(program, matches));
    this.matches = matches;
    // The keyboard stays on the event that it chose; a selection made elsewhere takes it along.
    if (this.cursor && this.valueAt(this.cursor) !== selected) this.cursor = null;
    const last = this.events.map((events) => events.length > 0).lastIndexOf(true);
    if (!this.cursor && last >= 0) this.cursor = { number: last, event: this.atWork(last)[0] };
    this.drawStrip();
    this.schedule();
  }

  /** The selected value's events in one program, those of the GPU if there are any. @param {number} number */
  atWork(number) {
    return atWork(this.shown[number].program, this.events[number]);
  }

  /** The value whose op an event is, "" for none. @param {Cursor} cursor */
  valueAt({ number, event }) {
    const { columns, values } = this.shown[number].program;
    return columns.value[event] > 0 ? values[columns.value[event] - 1] : "";
  }

  drawStrip() {
    const { selected, payload } = /** @type {View} */ (this.view);
    const twins = (payload.values[selected]?.twins ?? []).slice(0, 4).map((name) => chip(name, this.act));
    const isThere = this.events.some((events) => events.length > 0);
    const show = isThere && h("button", { class: "tf-chip", onclick: () => this.showNext(), "data-testid": "tf-timeline-show" }, "show");
    const facts = selected ? [h("code", null, selected), h("span", null, times(this.shown, this.events)), show || "", ...(twins.length > 0 ? [h("span", { class: "tf-note" }, "twin"), ...twins] : [])] : this.range ? [] : [h("span", { class: "tf-note" }, HINT)];
    const range = this.range ? [rangeTable(this.shown, this.range, () => this.measure(null))] : [];
    this.dom.strip.replaceChildren(h("p", { class: "tf-timeline-line" }, facts), ...range);
  }

  // --- what was asked ------------------------------------------------------------------------------------------------

  /** @param {Window} window */
  look(window) {
    this.window = window;
    this.schedule();
  }

  /** @param {Window | null} range */
  measure(range) {
    this.range = range;
    this.drawStrip();
    this.schedule();
  }

  /** Put the keyboard on an event, and select its op. @param {Cursor} cursor */
  choose(cursor) {
    this.cursor = cursor;
    const view = /** @type {View} */ (this.view);
    const value = this.valueAt(cursor);
    this.dom.spoken.replaceChildren(sentence(this.shown[cursor.number], cursor.event));
    if (value === view.selected) this.mark(view);
    else this.act.select(value);
  }

  speakRange() {
    if (this.range) this.dom.spoken.replaceChildren(rangeSentence(this.shown, this.range));
  }

  /** The next event of the selected value, wide enough to be seen; with the last one it begins again. */
  showNext() {
    const all = this.shown.flatMap(({ number }) => this.atWork(number).map((event) => ({ number, event })));
    const at = all.findIndex(({ number, event }) => number === this.showing?.number && event === this.showing.event);
    const next = all[(at + 1) % all.length];
    this.showing = next;
    this.showEvent(next);
  }

  /** In the middle, wide enough to be seen. @param {Cursor} next */
  showEvent(next) {
    const { start, duration: durations } = this.shown[next.number].program.columns;
    const middle = start[next.event] + durations[next.event] / 2;
    const length = Math.min(this.window.to - this.window.from, Math.max(12 * durations[next.event], this.span / 1e5));
    this.look(inside({ from: middle - length / 2, to: middle + length / 2 }, this.span));
    this.choose(next);
  }

  /** @param {string} value @param {number} number */
  locate(value, number) {
    const one = this.shown[number];
    const [event] = one ? eventsOf(one.program, value) : [];
    if (event === undefined) return null;
    const { start, duration: durations, lane } = one.program.columns;
    const left = Math.max(start[event], this.window.from);
    const right = Math.min(start[event] + durations[event], this.window.to);
    if (left > right) return null;
    const band = this.layout.rows[number].lanes[lane[event]];
    return { x: this.gestures.xOf((left + right) / 2), y: band.y + band.height / 2 };
  }

  // --- painting ------------------------------------------------------------------------------------------------------

  /** @param {Node[]} content @param {number} x @param {number} y */
  showTip(content, x, y) {
    const { tip } = this.dom;
    tip.replaceChildren(...content);
    tip.hidden = false;
    tip.style.left = `${Math.max(0, x + 14 + tip.offsetWidth > this.width ? x - 14 - tip.offsetWidth : x + 14)}px`;
    tip.style.top = `${Math.max(0, y + 18 + tip.offsetHeight > this.layout.height ? y - 10 - tip.offsetHeight : y + 18)}px`;
  }

  schedule() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      const width = this.dom.stage.clientWidth;
      if (width > 0 && this.shown.length > 0) this.paint(width);
    });
  }

  /** @param {number} width */
  paint(width) {
    const { canvas, context, bar, stage, strip, gaps } = this.dom;
    this.layout = arranged(this.shown, this.element.clientHeight - bar.offsetHeight - strip.offsetHeight - BELOW * (gaps.hidden ? 1 : 2));
    this.width = width;
    const scale = devicePixelRatio;
    const [across, down] = [Math.round(width * scale), Math.round(this.layout.height * scale)];
    if (canvas.width !== across || canvas.height !== down) {
      canvas.width = across;
      canvas.height = down;
      canvas.style.height = `${this.layout.height}px`;
    }
    context.setTransform(scale, 0, 0, scale, 0, 0);
    this.colours ??= colours(stage);
    const pixels = Math.max(1, Math.floor(width - this.layout.gutter));
    if (this.overviews[0]?.length !== pixels) this.overviews = this.shown.map(({ program }) => shares(program, this.span, pixels));
    paint(context, this.layout, width, this, this.colours);
    this.line.place(/** @type {View} */ (this.view), this.layout.rows.at(-1)?.memory, mostBytes(this.shown), this.layout.gutter);
    canvas.dataset.from = String(this.window.from);
    canvas.dataset.to = String(this.window.to);
  }
}
