// The pointer, the wheel and the keyboard on the graph.

import { boxAround, glyphAt, isOnGlyph, nearestNode, nodeAt, step } from "./walk.js";

/** @typedef {import("./layout.js").Node} Node @typedef {import("./layout.js").Box} Box */

/**
 * What the pointer and the keyboard act on.
 * @typedef {object} Target
 * @property {{ canvas: HTMLCanvasElement, map: HTMLCanvasElement }} frame
 * @property {import("./layout.js").Layout} layout
 * @property {import("./viewport.js").Viewport} port
 * @property {Node | null} cursor
 * @property {(node: Node | null) => Node[]} twinsOf
 * @property {(node: Node | null) => void} moveTo
 * @property {(box: Box) => void} toggleBox
 * @property {(node: Node | null, event: MouseEvent) => void} showTip
 */

const CLICK_PX = 4;
const PAN_PX = 60;
const ZOOM = 1.25;
/** @type {Record<string, [number, number]>} */
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/** @param {Target} panel @returns {() => void} stops it */
export function listen(panel) {
  const pointer = new Pointer(panel);
  const all = /** @type {[HTMLElement, string, (event: any) => void][]} */ ([
    [panel.frame.canvas, "pointerdown", (event) => pointer.down(event)],
    [panel.frame.canvas, "pointermove", (event) => pointer.move(event)],
    [panel.frame.canvas, "pointerleave", (event) => panel.showTip(null, event)],
    [panel.frame.canvas, "click", (event) => pointer.click(event)],
    [panel.frame.canvas, "dblclick", (event) => pointer.doubleClick(event)],
    [panel.frame.canvas, "wheel", (event) => onWheel(panel, event)],
    [panel.frame.canvas, "keydown", (event) => onKey(panel, event)],
    [panel.frame.map, "pointerdown", (event) => onMap(panel, event)],
    [panel.frame.map, "pointermove", (event) => event.buttons && onMap(panel, event)],
  ]);
  for (const [element, name, listener] of all) element.addEventListener(name, listener, { passive: false });
  return () => all.forEach(([element, name, listener]) => element.removeEventListener(name, listener));
}

class Pointer {
  /** @param {Target} panel */
  constructor(panel) {
    this.panel = panel;
    /** @type {{ x: number, y: number, isDrag: boolean } | null} */
    this.from = null;
    /** Whether the first click of a double one has opened or closed something already. */
    this.hasToggled = false;
  }

  /** @param {PointerEvent} event */
  down(event) {
    this.from = { x: event.clientX, y: event.clientY, isDrag: false };
    this.panel.frame.canvas.setPointerCapture(event.pointerId);
  }

  /** @param {PointerEvent} event */
  move(event) {
    const { panel, from } = this;
    if (!event.buttons || !from) {
      const point = pointAt(panel, event);
      const node = nodeAt(panel.layout, point);
      panel.frame.canvas.style.cursor = node || glyphAt(panel.layout, point) ? "pointer" : "";
      return panel.showTip(node, event);
    }
    const [dx, dy] = [event.clientX - from.x, event.clientY - from.y];
    if (!from.isDrag && Math.hypot(dx, dy) < CLICK_PX) return;
    panel.showTip(null, event);
    panel.port.pan(-dx, -dy);
    this.from = { x: event.clientX, y: event.clientY, isDrag: true };
  }

  /** @param {MouseEvent} event */
  click(event) {
    if (this.from?.isDrag || event.detail > 1) return;
    const { panel } = this;
    panel.showTip(null, event);
    const point = pointAt(panel, event);
    const node = nodeAt(panel.layout, point);
    const box = node?.module && isOnGlyph(node, point) ? node.module : glyphAt(panel.layout, point);
    this.hasToggled = Boolean(box);
    if (box) panel.toggleBox(box);
    else panel.moveTo(node);
  }

  /** @param {MouseEvent} event */
  doubleClick(event) {
    const node = nodeAt(this.panel.layout, pointAt(this.panel, event));
    if (!this.hasToggled && node?.module) this.panel.toggleBox(node.module);
  }
}

/** As any scrolled element: at the end, the page scrolls on. @param {Target} panel @param {WheelEvent} event */
function onWheel(panel, event) {
  const unit = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1;
  const [dx, dy] = [event.deltaX * unit, event.deltaY * unit];
  if (event.ctrlKey || event.metaKey) {
    panel.port.zoom(Math.exp(-dy * 0.002), pixelIn(panel.frame.canvas, event));
  } else if (!(event.shiftKey && !dx ? panel.port.pan(dy, 0) : panel.port.pan(dx, dy))) return;
  panel.showTip(null, event);
  event.preventDefault();
}

/** @param {Target} panel @param {PointerEvent} event */
function onMap(panel, event) {
  panel.frame.map.setPointerCapture(event.pointerId);
  const { x, y } = pixelIn(panel.frame.map, event);
  const { size, world } = panel.port;
  panel.port.center({ x: world.x + (x / panel.frame.map.clientWidth) * world.w, y: (y / size.h) * world.h });
}

/** @param {HTMLElement} element @param {MouseEvent} event */
function pixelIn(element, event) {
  const { left, top } = element.getBoundingClientRect();
  return { x: event.clientX - left, y: event.clientY - top };
}

/** What of the graph is under the pointer. @param {Target} panel @param {MouseEvent} event */
function pointAt(panel, event) {
  return panel.port.inGraph(pixelIn(panel.frame.canvas, event));
}

/** @param {Target} panel @param {KeyboardEvent} event */
function onKey(panel, event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !act(panel, event)) return;
  event.preventDefault();
}

/** Whether the key means something here. @param {Target} panel @param {KeyboardEvent} event */
function act(panel, { key, shiftKey }) {
  const arrow = ARROWS[key];
  if (arrow && shiftKey) panel.port.pan(arrow[0] * PAN_PX, arrow[1] * PAN_PX);
  else if (arrow) walk(panel, key);
  else if (key === "Enter") enter(panel);
  else if (key === "Escape") panel.moveTo(null);
  else if (key === "+" || key === "=") panel.port.zoom(ZOOM);
  else if (key === "-") panel.port.zoom(1 / ZOOM);
  else if (key === "0") panel.port.fit();
  else if (key === "PageDown" || key === "PageUp") panel.port.pan(0, (key === "PageDown" ? 0.9 : -0.9) * panel.port.size.h);
  else if (key === "Home" || key === "End") panel.port.pan(0, key === "End" ? 1e9 : -1e9);
  else return false;
  return true;
}

/** @param {Target} panel @param {string} key */
function walk(panel, key) {
  const { cursor, layout } = panel;
  const next = cursor ? step(cursor, key, layout, panel.twinsOf(cursor)[0] ?? null) : nearestNode(layout, panel.port.seen(), () => true);
  if (next) panel.moveTo(next);
}

/** @param {Target} panel */
function enter(panel) {
  const { cursor, layout } = panel;
  const box = cursor && (cursor.module ?? boxAround(layout, cursor));
  if (box) panel.toggleBox(box);
}
