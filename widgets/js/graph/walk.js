// The node under the pointer, and the node where an arrow key leads. It needs no DOM.

import { PHASES } from "./layout.js";

/** @typedef {import("./layout.js").Node} Node @typedef {import("./layout.js").Box} Box @typedef {import("./layout.js").Layout} Layout @typedef {import("./viewport.js").Point} Point */

const GLYPH = { w: 22, h: 24 };

/** @param {Layout} layout @param {Point} at @returns {Node | null} */
export function nodeAt({ nodes }, at) {
  for (const node of nodes.values()) if (isIn(node, at)) return node;
  return null;
}

/** The open module whose ▾ is there. @param {Layout} layout @param {Point} at @returns {Box | null} */
export function glyphAt({ boxes }, at) {
  return boxes.find((box) => box.isOpen && isIn({ ...box, ...GLYPH }, at)) ?? null;
}

/** Whether a collapsed module's ▸ is there. @param {Node} node @param {Point} at */
export function isOnGlyph(node, at) {
  return node.module !== null && isIn({ ...node, ...GLYPH }, at);
}

/** @param {{ x: number, y: number, w: number, h: number }} rect @param {Point} at */
function isIn({ x, y, w, h }, at) {
  return at.x >= x && at.x < x + w && at.y >= y && at.y < y + h;
}

/** The innermost open module around a node. @param {Layout} layout @param {Node} node @returns {Box | null} */
export function boxAround({ boxes }, node) {
  const around = boxes.filter((box) => box.isOpen && isIn(box, middle(node)));
  return around.reduce((inner, box) => (!inner || box.level > inner.level ? box : inner), /** @type {Box | null} */ (null));
}

/** @param {Node} node */
const middle = ({ x, y, w, h }) => ({ x: x + w / 2, y: y + h / 2 });

/**
 * Where an arrow leads: ↓ and ↑ along an edge, else to the next row; ← and → to a neighbour in the row, else to the other half,
 * to `twin` if there is one.
 * @param {Node} from @param {string} key @param {Layout} layout @param {Node | null} twin @returns {Node | null}
 */
export function step(from, key, layout, twin) {
  if (key === "ArrowDown" || key === "ArrowUp") return upOrDown(from, key === "ArrowDown" ? 1 : -1, layout);
  return sideways(from, key === "ArrowRight" ? 1 : -1, layout, twin);
}

/** @param {Node} from @param {1 | -1} sign @param {Layout} layout */
function upOrDown(from, sign, { nodes }) {
  const isAhead = (/** @type {Node} */ node) => sign * (node.y - from.y) > 0;
  const along = [...from.inputs, ...from.readers].filter(isAhead);
  const others = [...nodes.values()].filter((node) => node.phase === from.phase && isAhead(node));
  return closest(from, along.length > 0 ? along : others);
}

/** @param {Node} from @param {1 | -1} sign @param {Layout} layout @param {Node | null} twin */
function sideways(from, sign, { nodes }, twin) {
  const all = [...nodes.values()];
  const row = all.filter((node) => node.phase === from.phase && Math.abs(node.y - from.y) < from.h / 2 && sign * (node.x - from.x) > 0);
  if (row.length > 0) return closest(from, row);
  const other = PHASES[PHASES.indexOf(from.phase) + sign];
  if (!other) return null;
  return (twin?.phase === other ? twin : null) ?? closest(from, all.filter((node) => node.phase === other));
}

/** Rows count more than columns. @param {Node} from @param {Node[]} nodes @returns {Node | null} */
function closest(from, nodes) {
  const distance = (/** @type {Node} */ node) => 3 * Math.abs(node.y - from.y) + Math.abs(node.x - from.x);
  return nodes.reduce((best, node) => (!best || distance(node) < distance(best) ? node : best), /** @type {Node | null} */ (null));
}

/** The node nearest to a point. @param {Layout} layout @param {Point} at @param {(node: Node) => boolean} is @returns {Node | null} */
export function nearestNode({ nodes }, at, is) {
  const distance = (/** @type {Node} */ node) => Math.hypot(middle(node).x - at.x, middle(node).y - at.y);
  return [...nodes.values()].filter(is).reduce((best, node) => (!best || distance(node) < distance(best) ? node : best), /** @type {Node | null} */ (null));
}
