// The camera of the graph: which part of it is on the screen, and what moves that. It needs no DOM.

/** The point of the graph at the view's upper left corner, and pixels per unit. @typedef {{ x: number, y: number, scale: number }} Camera */
/** @typedef {{ x: number, y: number }} Point */
/** @typedef {{ x: number, y: number, w: number, h: number }} Rect */
/** Of the view, in pixels. @typedef {{ w: number, h: number }} Size */

const MARGIN = { side: 4, top: 34, bottom: 24 };
const SCALES = { least: 0.02, most: 3 };
const FULL = 1;

/** The graph's whole width, from its top, but not larger than life. @param {Rect} graph @param {Size} view @returns {Camera} */
export function fitWidth(graph, view) {
  const scale = clamp((view.w - 2 * MARGIN.side) / Math.max(1, graph.w), SCALES.least, FULL);
  return bounded({ x: graph.x, y: graph.y - MARGIN.top / scale, scale }, graph, view);
}

/** Never away from the graph; a graph narrower than the view stands in its middle. @param {Camera} camera @param {Rect} graph @param {Size} view @returns {Camera} */
export function bounded({ x, y, scale }, graph, view) {
  const [w, h] = [view.w / scale, view.h / scale];
  const [side, top, bottom] = [MARGIN.side / scale, MARGIN.top / scale, MARGIN.bottom / scale];
  const isNarrow = graph.w + 2 * side <= w;
  const isShort = graph.h + top + bottom <= h;
  return {
    x: isNarrow ? graph.x + (graph.w - w) / 2 : clamp(x, graph.x - side, graph.x + graph.w + side - w),
    y: isShort ? graph.y - top : clamp(y, graph.y - top, graph.y + graph.h + bottom - h),
    scale,
  };
}

/** The point under `at` stays where it is. @param {Camera} camera @param {number} factor @param {{ x: number, y: number }} at in pixels @returns {Camera} */
export function zoomed({ x, y, scale }, factor, at) {
  const next = clamp(scale * factor, SCALES.least, SCALES.most);
  return { x: x + at.x / scale - at.x / next, y: y + at.y / scale - at.y / next, scale: next };
}

/** As little as brings `rect` into view, with some room around it. @param {Camera} camera @param {Rect} rect @param {Size} view @returns {Camera} */
export function revealed({ x, y, scale }, rect, view) {
  const into = (/** @type {number} */ from, /** @type {number} */ start, /** @type {number} */ length, /** @type {number} */ room, /** @type {number} */ margin) =>
    clamp(from, start + length + margin - room, start - margin);
  return { x: into(x, rect.x, rect.w, view.w / scale, MARGIN.side / scale), y: into(y, rect.y, rect.h, view.h / scale, 2 * MARGIN.top / scale), scale };
}

/** @param {number} value @param {number} least @param {number} most */
export function clamp(value, least, most) {
  return Math.max(least, Math.min(most, value));
}

/** @param {Rect} one @param {Rect} other */
export function overlaps(one, other) {
  return one.x < other.x + other.w && other.x < one.x + one.w && one.y < other.y + other.h && other.y < one.y + one.h;
}

export class Viewport {
  /** @param {() => void} changed */
  constructor(changed) {
    this.changed = changed;
    this.size = { w: 0, h: 0 };
    /** The graph's. @type {Rect} */
    this.world = { x: 0, y: 0, w: 0, h: 0 };
    /** Null until there is room. @type {Camera | null} */
    this.camera = null;
  }

  /** @param {Camera} camera */
  set(camera) {
    this.camera = bounded(camera, this.world, this.size);
    this.changed();
  }

  /** @param {{ w: number, h: number }} size in pixels */
  resize(size) {
    this.size = size;
    this.camera ? this.set(this.camera) : this.fit();
  }

  fit() {
    this.camera = fitWidth(this.world, this.size);
    this.changed();
  }

  /** The graph is another one, and what the eye is on is `shift` away from where it was. @param {{ x: number, w: number, h: number }} graph @param {Point} shift */
  follow({ x, w, h }, shift) {
    this.world = { x, y: 0, w, h };
    const { camera } = this;
    if (camera) this.set({ ...camera, x: camera.x + shift.x, y: camera.y + shift.y });
  }

  /** @param {number} factor @param {Point} [at] in pixels */
  zoom(factor, at = { x: this.size.w / 2, y: this.size.h / 2 }) {
    if (this.camera) this.set(zoomed(this.camera, factor, at));
  }

  /** By pixels. Whether it could. @param {number} dx @param {number} dy */
  pan(dx, dy) {
    if (!this.camera) return false;
    const { x, y, scale } = this.camera;
    this.set({ x: x + dx / scale, y: y + dy / scale, scale });
    return Math.abs(this.camera.x - x) + Math.abs(this.camera.y - y) > 0.01 / scale;
  }

  /** Put a point in the middle. @param {Point} point */
  center({ x, y }) {
    const { w, h } = this.seen();
    if (this.camera) this.set({ ...this.camera, x: x - w / 2, y: y - h / 2 });
  }

  /** @param {Rect} rect */
  reveal(rect) {
    if (this.camera) this.set(revealed(this.camera, rect, this.size));
  }

  /** What of the graph is in view. @returns {Rect} */
  seen() {
    const { x, y, scale } = this.camera ?? { x: 0, y: 0, scale: 1 };
    return { x, y, w: this.size.w / scale, h: this.size.h / scale };
  }

  middle() {
    const { x, y, w, h } = this.seen();
    return { x: x + w / 2, y: y + h / 2 };
  }

  /** @param {Point} point of the graph */
  onScreen({ x, y }) {
    const { camera } = this;
    return camera && { x: (x - camera.x) * camera.scale, y: (y - camera.y) * camera.scale };
  }

  /** @param {Point} pixel */
  inGraph(pixel) {
    const { x, y, scale } = this.camera ?? { x: 0, y: 0, scale: 1 };
    return { x: x + pixel.x / scale, y: y + pixel.y / scale };
  }
}
