// The memory line: a slider that lies on the peak of the optimised program. Dragged down, or moved by keys, it asks for a budget
// on the peak, by which remat recomputes.

import { formatBytes, h, plural } from "../parts/dom.js";
import { NEEDS_KERNEL } from "../parts/widgets.js";

/** @typedef {import("./bands.js").Band} Band */

/** How far a key moves it, as shares of the whole. @type {Record<string, number>} */
const STEPS = { ArrowDown: -0.01, ArrowLeft: -0.01, ArrowUp: 0.01, ArrowRight: 0.01, PageDown: -0.1, PageUp: 0.1 };
/** What is dragged is asked for when it is let go; what keys move, so many milliseconds later. */
const QUIET_MS = 600;

export class MemoryLine {
  /** @param {Act} act */
  constructor(act) {
    this.act = act;
    /** That of the view. @type {Payload | null} */
    this.payload = null;
    /** What it was moved to, until the answer is there. @type {number | null} */
    this.wanted = null;
    this.isAsked = false;
    /** @type {Band} */
    this.band = { y: 0, height: 1 };
    this.most = 1;
    this.timer = 0;
    /** The least peak that remat found, once a budget was missed, and of which other options. @type {{ of: string, bytes: number } | null} */
    this.found = null;
    this.label = h("span", { class: "tf-memory-label" });
    this.element = h("div", { class: "tf-memory-line", role: "slider", tabindex: "0", "aria-label": "budget on the peak memory", "aria-orientation": "vertical", "data-testid": "tf-memory-line" }, this.label);
    this.element.addEventListener("pointerdown", (event) => this.grab(event));
    this.element.addEventListener("keydown", (event) => this.onKey(event));
  }

  /** Where it stands: in the memory of the optimised program. @param {View} view @param {Band | undefined} band @param {number} most bytes at its top @param {number} left */
  place(view, band, most, left) {
    const { payload } = view;
    // A run of the user's own has no passes.
    this.element.hidden = !band || band.height === 0 || payload.summary?.beside_budget === undefined;
    if (!band || this.element.hidden) return;
    const isRefused = this.isAsked && view.status.error?.panel === "passes";
    if (payload !== this.payload || isRefused) this.forget();
    Object.assign(this, { payload, band, most });
    if (this.missed) this.found = { of: this.others, bytes: this.peak };
    this.element.style.left = `${left}px`;
    this.draw();
  }

  /** Bytes that the view counts and the budget does not: an optimizer's state. */
  get onTop() {
    return /** @type {Payload} */ (this.payload).summary.beside_budget;
  }

  get peak() {
    return /** @type {Payload} */ (this.payload).summary.peak_bytes[1];
  }

  /** What is in force, as the view counts it; null without a budget. */
  get budget() {
    const given = /** @type {Payload} */ (this.payload).config.peak_budget;
    return given === null ? null : given + this.onTop;
  }

  /** All options but the budget itself. */
  get others() {
    const { peak_budget: _, ...others } = /** @type {Payload} */ (this.payload).config;
    return JSON.stringify(others);
  }

  /** What it cannot be moved below, as the view counts it, and how that is known. @returns {[number, string]} */
  get least() {
    if (this.found?.of === this.others) return [this.found.bytes, "the least that was found"];
    return [/** @type {Payload} */ (this.payload).summary.least_peak, "no choice of what is recomputed reaches less"];
  }

  /** Why the budget in force cannot be met: the least peak, at which op, and what is alive there. */
  get missed() {
    return this.payload?.decisions.remat?.find(({ action, values }) => action === "miss" && values[0] === "peak_budget")?.reason;
  }

  get problem() {
    if (!this.act.live) return NEEDS_KERNEL;
    return this.payload?.config.remat === null ? "remat is off: switch it on to set a budget on the peak" : "";
  }

  /** What stands at a line that is still. */
  get stillText() {
    const why = this.act.live ? "a budget needs remat, which is off" : "a budget needs a kernel: run it in a notebook";
    return `peak ${formatBytes(this.budget ?? this.peak)} · ${why}`;
  }

  draw() {
    const { budget, peak } = this;
    const shown = this.wanted ?? budget ?? peak;
    const bytes = Math.min(shown, this.most);
    const isWanted = this.wanted !== null;
    const [least, known] = this.least;
    const end = isWanted && shown <= least ? `, ${known}` : "";
    const text = isWanted || budget !== null ? `peak at most ${formatBytes(shown)}${end}` : "drag down: a budget on the peak";
    const missed = isWanted ? undefined : this.missed;
    const again = this.payload?.memory.after.again.length ?? 0;
    const more = isWanted || again === 0 ? "" : ` · ▮ ${plural(again, "op")} computed again`;
    const isStill = this.problem !== "";
    this.label.textContent = isStill ? this.stillText : missed ? `⇕ ${text} cannot be met: the least found is ${formatBytes(peak)}` : `⇕ ${text}${more}`;
    this.element.style.top = `${this.band.y + this.band.height - 1 - (bytes / this.most) * (this.band.height - 1)}px`;
    this.element.classList.toggle("tf-memory-set", isWanted || budget !== null);
    this.element.classList.toggle("tf-memory-missed", missed !== undefined);
    const said = { "aria-valuemin": Math.round(least), "aria-valuemax": Math.round(this.top), "aria-valuenow": Math.round(bytes), "aria-valuetext": isWanted || budget !== null ? text : `no budget: the peak is ${formatBytes(peak)}`, "aria-disabled": isStill };
    for (const [name, value] of Object.entries(said)) this.element.setAttribute(name, String(value));
    const without = this.onTop > 0 ? ` The budget is one on forward and backward, ${formatBytes(this.onTop)} of the whole step's peak aside.` : "";
    this.element.title = this.problem || (missed && `${missed}.${without}`) || `${text}; least: ${formatBytes(least)}, ${known}.${without} Arrows move it, Enter asks for it, Delete takes it away`;
  }

  /** Above the peak that there is without a budget nothing is asked for. */
  get top() {
    return Math.max(/** @type {Payload} */ (this.payload).summary.peak_bytes[0], this.peak, this.budget ?? 0);
  }

  /** @param {number} bytes */
  move(bytes) {
    this.wanted = Math.max(this.least[0], Math.min(bytes, this.top));
    this.isAsked = false;
    this.draw();
  }

  /** Ask for what it stands at: at the top for no budget. */
  commit() {
    clearTimeout(this.timer);
    if (this.wanted === null || this.isAsked) return;
    const asked = this.wanted >= this.top ? null : Math.max(2, Math.round(this.wanted - this.onTop));
    if (asked === /** @type {Payload} */ (this.payload).config.peak_budget) return this.cancel();
    this.isAsked = true;
    this.act.configure({ peak_budget: asked });
  }

  cancel() {
    this.forget();
    this.draw();
  }

  forget() {
    clearTimeout(this.timer);
    this.wanted = null;
    this.isAsked = false;
  }

  /** @param {PointerEvent} event */
  grab(event) {
    if (this.problem || event.button !== 0) return;
    event.preventDefault();
    this.element.focus({ preventScroll: true });
    this.element.setPointerCapture(event.pointerId);
    const [from, bytes] = [event.clientY, this.wanted ?? this.budget ?? this.peak];
    const onMove = (/** @type {PointerEvent} */ moved) => this.move(bytes - ((moved.clientY - from) / (this.band.height - 1)) * this.most);
    const onEnd = (/** @type {PointerEvent} */ ended) => {
      this.element.removeEventListener("pointermove", onMove);
      for (const name of ["pointerup", "pointercancel"]) this.element.removeEventListener(name, /** @type {any} */ (onEnd));
      if (ended.type === "pointerup") this.commit();
      else this.cancel();
    };
    this.element.addEventListener("pointermove", onMove);
    for (const name of ["pointerup", "pointercancel"]) this.element.addEventListener(name, /** @type {any} */ (onEnd));
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    const { key } = event;
    if (!(key in STEPS) && !["Enter", "Escape", "Delete", "Backspace", "Home", "End"].includes(key)) return;
    event.preventDefault();
    event.stopPropagation();
    if (this.problem) return;
    if (key === "Enter") return this.commit();
    if (key === "Escape") return this.cancel();
    const at = this.wanted ?? this.budget ?? this.peak;
    this.move(key in STEPS ? at + STEPS[key] * this.top : key === "Home" ? this.least[0] : this.top);
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => this.commit(), QUIET_MS);
  }
}
