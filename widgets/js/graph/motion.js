// The motion from one layout to the next, so that the eye sees what moved.

/** @typedef {import("./layout.js").Node} Node @typedef {import("./layout.js").Box} Box @typedef {import("./layout.js").Layout} Layout @typedef {import("./viewport.js").Rect} Rect */

const MS = 200;

export class Motion {
  constructor() {
    this.started = -Infinity;
    /** @type {Map<Node | Box, Rect>} */
    this.from = new Map();
    /** @type {Set<Node>} */
    this.entering = new Set();
    /** @type {{ node: Node, rect: Rect }[]} */
    this.leaving = [];
  }

  /** @param {Layout} before @param {Layout} after @param {{ x: number, y: number }} shift by which the camera follows */
  begin(before, after, shift) {
    this.from.clear();
    this.entering.clear();
    this.leaving = [];
    const isStill = before.nodes.size === 0 || matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.started = isStill ? -Infinity : performance.now();
    if (isStill) return;
    const old = new Map(before.boxes.filter(({ isOpen }) => isOpen).map((box) => [box.module.path, box]));
    for (const box of after.boxes) this.startAt(box, old.get(box.module.path), shift);
    for (const node of after.nodes.values()) {
      const was = before.nodes.get(node.id);
      this.startAt(node, was, shift);
      if (!was) this.entering.add(node);
    }
    for (const node of before.nodes.values()) {
      if (!after.nodes.has(node.id)) this.leaving.push({ node, rect: { ...node, x: node.x + shift.x, y: node.y + shift.y } });
    }
  }

  /** @param {Node | Box} one @param {Rect | undefined} was @param {{ x: number, y: number }} shift */
  startAt(one, was, shift) {
    if (was) this.from.set(one, { x: was.x + shift.x, y: was.y + shift.y, w: was.w, h: was.h });
  }

  /** How far everything is on its way, 1 when it is there. */
  moved() {
    const share = Math.min(1, (performance.now() - this.started) / MS);
    return 1 - (1 - share) ** 3;
  }

  /** @param {Node | Box} one @param {number} moved @returns {Rect} */
  rectOf(one, moved) {
    const from = this.from.get(one);
    if (!from) return one;
    const between = (/** @type {"x" | "y" | "w" | "h"} */ side) => from[side] + (one[side] - from[side]) * moved;
    return { x: between("x"), y: between("y"), w: between("w"), h: between("h") };
  }
}
