// The lines of the graph: who reads whom in each half, and the tensors that the forward saves for the backward.

import { isBox } from "./layout.js";
import { overlaps } from "./viewport.js";

/** @typedef {import("./layout.js").Node} Node @typedef {import("./layout.js").Edge} Edge @typedef {import("./layout.js").Layout} Layout @typedef {import("./layout.js").Box} Box */
/** @typedef {import("./viewport.js").Rect} Rect @typedef {import("./viewport.js").Camera} Camera */

/**
 * What is painted, and how it looks at this moment.
 * @typedef {object} Scene
 * @property {Layout} layout
 * @property {Camera} camera
 * @property {{ w: number, h: number }} size of the view in pixels, without the minimap
 * @property {Record<string, string>} colours
 * @property {Map<string, number>} keys what runs, by the number of its colour
 * @property {boolean} isHeat coloured by time
 * @property {number} most µs of the slowest node
 * @property {boolean} hasLinks all saved-tensor links are shown
 * @property {Node | null} cursor
 * @property {Set<Node>} near what the cursor's node reads and who reads it
 * @property {Set<Node>} twins
 * @property {(node: Node) => boolean} isDim
 * @property {(node: Node) => string} markOf "+", "~", "−" or ""
 * @property {(one: Node | Box) => Rect} rectOf where it is at this moment
 * @property {number} moved share of the way to its place, 1 when everything is there
 * @property {Set<Node>} entering
 * @property {{ node: Node, rect: Rect }[]} leaving
 */

const FAR = 160;
const BOW = 150;
const STRAIGHT = 0.12;

/** @param {CanvasRenderingContext2D} context @param {Rect} view @param {Scene} scene */
export function paintEdges(context, view, scene) {
  const { layout, colours, camera, cursor } = scene;
  const own = /** @type {Edge[]} */ ([]);
  context.strokeStyle = colours.lineStrong;
  context.lineWidth = 1.2 / Math.max(camera.scale, 0.25);
  context.beginPath();
  for (const edge of layout.edges) {
    if (cursor && (edge.from === cursor || edge.to === cursor)) own.push(edge);
    else flow(context, edge, view, scene);
  }
  context.stroke();
  context.strokeStyle = colours.brand;
  context.lineWidth = 2.2 / Math.max(camera.scale, 0.25);
  context.beginPath();
  for (const edge of own) flow(context, edge, view, scene);
  context.stroke();
}

/** Add an edge to the path, if any of it can be in view. @param {CanvasRenderingContext2D} context @param {Edge} edge @param {Rect} view @param {Scene} scene */
function flow(context, { from, to, phase }, view, { rectOf, layout, camera }) {
  const [a, b] = [rectOf(from), rectOf(to)];
  const isDown = phase !== "backward";
  // A folded layer's edge ends at the border of the layer that stands for it, on the side where it comes in or goes out.
  const start = { x: isBox(from) ? layout.axes[phase] : a.x + a.w / 2, y: isDown !== (isBox(from) && holds(a, b)) ? a.y + a.h : a.y };
  const end = { x: isBox(to) ? layout.axes[phase] : b.x + b.w / 2, y: isDown !== (isBox(to) && holds(b, a)) ? b.y : b.y + b.h };
  const left = Math.min(start.x, end.x) - BOW;
  const top = Math.min(start.y, end.y);
  if (!overlaps({ x: left, y: top - 1, w: Math.abs(start.x - end.x) + 2 * BOW, h: Math.abs(start.y - end.y) + 2 }, view)) return;
  context.moveTo(start.x, start.y);
  if (camera.scale < STRAIGHT) return context.lineTo(end.x, end.y);
  const length = Math.abs(end.y - start.y);
  const bend = Math.min(length * 0.5, 60) * (isDown ? 1 : -1);
  // What skips several rows goes around those, on its half's outer side.
  const out = length > FAR && Math.abs(start.x - end.x) < 80 ? BOW * (isDown ? -1 : 1) : 0;
  context.bezierCurveTo(start.x + out, start.y + bend, end.x + out, end.y - bend, end.x, end.y);
}

/** @param {Rect} outer @param {Rect} inner */
const holds = (outer, inner) => inner.y >= outer.y && inner.y + inner.h <= outer.y + outer.h;

/** @param {CanvasRenderingContext2D} context @param {Rect} view @param {Scene} scene */
export function paintLinks(context, view, { layout, cursor, hasLinks, colours, camera, rectOf }) {
  const own = cursor ? [...cursor.saved].map((other) => /** @type {[Node, Node]} */ (cursor.phase === "forward" ? [cursor, other] : [other, cursor])) : [];
  context.setLineDash([5, 3]);
  context.strokeStyle = colours.twin;
  for (const { links, alpha, width } of [{ links: hasLinks ? layout.links : [], alpha: 0.55, width: 1.2 }, { links: own, alpha: 1, width: 2 }]) {
    context.globalAlpha = alpha;
    context.lineWidth = width / Math.max(camera.scale, 0.25);
    context.beginPath();
    for (const [from, to] of links) {
      const [a, b] = [rectOf(from), rectOf(to)];
      const [start, end] = [{ x: a.x + a.w, y: a.y + a.h / 2 }, { x: b.x, y: b.y + b.h / 2 }];
      const bounds = { x: start.x, y: Math.min(start.y, end.y) - 1, w: Math.max(1, end.x - start.x), h: Math.abs(end.y - start.y) + 2 };
      if (!overlaps(bounds, view)) continue;
      const bend = Math.max(24, (end.x - start.x) * 0.45);
      context.moveTo(start.x, start.y);
      context.bezierCurveTo(start.x + bend, start.y, end.x - bend, end.y, end.x, end.y);
    }
    context.stroke();
  }
  context.setLineDash([]);
  context.globalAlpha = 1;
}
