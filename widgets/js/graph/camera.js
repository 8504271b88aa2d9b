// What of the graph is on the screen. A camera is the point of the graph at the view's upper left corner, and pixels per unit.

/** @typedef {{ x: number, y: number, scale: number }} Camera */
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
