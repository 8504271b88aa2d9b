// The painting of the graph on a canvas. Only what is in view is drawn, and text only where it can be read.

import { paintEdges, paintLinks } from "./lines.js";
import { boxName, boxNote, keyOf, letter, lines, shares, timeOf } from "./text.js";
import { clamp, overlaps } from "./viewport.js";

/** @typedef {import("./layout.js").Node} Node @typedef {import("./layout.js").Box} Box @typedef {import("./layout.js").Layout} Layout */
/** @typedef {import("./viewport.js").Rect} Rect @typedef {import("./lines.js").Scene} Scene */

const HUES = 8;
/** Of the scale: below it, texts have one size on the screen, and fewer lines. */
const LEGIBLE = 0.82;
const CAPTION_PX = 10;
const FONT = { title: "600 12px", text: "11px" };
const STRIPE = 20;
const HEAD = 22;

/** @param {CanvasRenderingContext2D} context @param {Scene} scene @param {number} ratio pixels of the screen per CSS pixel */
export function paint(context, scene, ratio) {
  const { camera, size, colours } = scene;
  const { scale } = camera;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.globalAlpha = 1;
  context.fillStyle = colours.bg;
  context.fillRect(0, 0, size.w, size.h);
  context.setTransform(ratio * scale, 0, 0, ratio * scale, -camera.x * scale * ratio, -camera.y * scale * ratio);
  const view = { x: camera.x, y: camera.y, w: size.w / scale, h: size.h / scale };
  for (const box of scene.layout.boxes) if (box.isOpen) paintBox(context, box, view, scene);
  paintEdges(context, view, scene);
  paintLinks(context, view, scene);
  for (const { node, rect } of scene.leaving) paintNode(context, node, rect, 1 - scene.moved, scene);
  for (const node of scene.layout.nodes.values()) {
    const rect = scene.rectOf(node);
    if (overlaps(rect, view)) paintNode(context, node, rect, scene.entering.has(node) ? scene.moved : 1, scene);
  }
  context.globalAlpha = 1;
}

/** @param {CanvasRenderingContext2D} context @param {Rect} rect @param {number} radius */
function rounded(context, { x, y, w, h }, radius) {
  context.beginPath();
  context.roundRect(x, y, w, h, radius);
}

/** @param {CanvasRenderingContext2D} context @param {Box} box @param {Rect} view @param {Scene} scene */
function paintBox(context, box, view, { rectOf, colours, camera }) {
  const rect = rectOf(box);
  if (!overlaps(rect, view)) return;
  context.lineWidth = 1 / Math.max(camera.scale, 0.3);
  context.strokeStyle = colours.line;
  context.fillStyle = box.level % 2 ? colours.sunken : colours.bg;
  if (box.members.length > 1) for (const off of [8, 4]) sheet(context, { ...rect, x: rect.x + off, y: rect.y + off });
  sheet(context, rect);
  if (camera.scale < 0.5) return;
  context.textBaseline = "middle";
  const font = (/** @type {string} */ kind) => `${kind} ${Math.max(11, CAPTION_PX / camera.scale)}px`;
  const name = `▾ ${boxName(box)}`;
  context.font = `${font("600")} ${colours.mono}`;
  context.fillStyle = colours.text;
  context.fillText(name, rect.x + 10, rect.y + 14);
  const used = 10 + context.measureText(name).width + 10;
  context.font = `${font("")} ${colours.sans}`;
  context.fillStyle = colours.soft;
  context.fillText(cut(context, boxNote(box), rect.w - used - 8), rect.x + used, rect.y + 14);
}

/** @param {CanvasRenderingContext2D} context @param {Rect} rect */
function sheet(context, rect) {
  rounded(context, rect, 8);
  context.fill();
  context.stroke();
}

// --- nodes ---------------------------------------------------------------------------------------------------------------

/** @param {CanvasRenderingContext2D} context @param {Node} node @param {Rect} rect @param {number} alpha @param {Scene} scene */
function paintNode(context, node, rect, alpha, scene) {
  const { colours, camera } = scene;
  const isRemoved = scene.markOf(node) === "−";
  context.globalAlpha = alpha * (scene.isDim(node) ? 0.22 : isRemoved ? 0.5 : 1);
  const sheets = node.module && node.module.members.length > 1 && camera.scale > 0.2 ? [6, 3] : [];
  context.lineWidth = 1 / Math.max(camera.scale, 0.3);
  context.strokeStyle = colours.lineStrong;
  context.fillStyle = colours.raised;
  for (const off of sheets) sheet(context, { ...rect, x: rect.x + off, y: rect.y + off });
  if (isRemoved) context.setLineDash([4, 3]);
  sheet(context, rect);
  context.setLineDash([]);
  fillNode(context, node, rect, scene);
  outline(context, node, rect, scene);
  if (camera.scale >= LEGIBLE) write(context, node, rect, scene);
  else caption(context, node, rect, scene);
}

/** @param {CanvasRenderingContext2D} context @param {Node} node @param {Rect} rect @param {Scene} scene */
function fillNode(context, node, rect, { colours, keys, isHeat, most, camera }) {
  const alpha = context.globalAlpha;
  if (isHeat) {
    context.globalAlpha = alpha * heat(nodeTime(node), most);
    context.fillStyle = colours.heat;
    rounded(context, rect, 6);
    context.fill();
  } else if (node.module) {
    bar(context, node, rect, keys, colours);
  } else {
    const at = keys.get(keyOf(node.ops[0])) ?? 0;
    context.fillStyle = colours[`k${at % HUES}`];
    if (camera.scale < LEGIBLE) rounded(context, rect, 6);
    else {
      context.beginPath();
      context.roundRect(rect.x, rect.y, STRIPE, rect.h, [6, 0, 0, 6]);
    }
    context.fill();
  }
  context.globalAlpha = alpha;
}

/** How a collapsed module's time is shared among what runs in it. @param {CanvasRenderingContext2D} context @param {Node} node @param {Rect} rect @param {Map<string, number>} keys @param {Record<string, string>} colours */
function bar(context, node, rect, keys, colours) {
  const parts = partsOf(node);
  const total = parts.reduce((sum, { us }) => sum + us, 0);
  let left = rect.x + 1;
  for (const { key, us } of parts) {
    const width = total ? ((rect.w - 2) * us) / total : 0;
    context.fillStyle = colours[`k${(keys.get(key) ?? 0) % HUES}`];
    context.fillRect(left, rect.y + rect.h - 4, width, 3);
    left += width;
  }
}

const partsOf = kept((node) => shares(node.ops));
const linesOf = kept(lines);
const nodeTime = kept((node) => timeOf(node.ops));

/** Work out once per node, not once per frame. @template T @param {(node: Node) => T} make @returns {(node: Node) => T} */
function kept(make) {
  /** @type {WeakMap<Node, T>} */
  const known = new WeakMap();
  return (node) => {
    if (known.has(node)) return /** @type {T} */ (known.get(node));
    const found = make(node);
    known.set(node, found);
    return found;
  };
}

/** How strong a time's colour is. A root, so that what takes a tenth can still be seen. @param {number | null} us @param {number} most */
export function heat(us, most) {
  return us === null || !most ? 0 : 0.85 * Math.sqrt(us / most);
}

/** @param {CanvasRenderingContext2D} context @param {Node} node @param {Rect} rect @param {Scene} scene */
function outline(context, node, rect, { colours, cursor, near, twins, camera }) {
  const colour = node === cursor ? colours.brand : twins.has(node) ? colours.twin : near.has(node) ? colours.brand : "";
  if (!colour) return;
  context.globalAlpha = 1;
  context.strokeStyle = colour;
  context.lineWidth = (node === cursor ? 3 : 1.8) / Math.max(camera.scale, 0.3);
  if (twins.has(node)) context.setLineDash([7, 3]);
  rounded(context, rect, 6);
  context.stroke();
  context.setLineDash([]);
}

/** Where there is no room for more: what it runs and its figures, or the first alone, in letters of one size on the screen. @param {CanvasRenderingContext2D} context @param {Node} node @param {Rect} rect @param {Scene} scene */
function caption(context, node, rect, { colours, isHeat, camera: { scale }, markOf }) {
  const font = (/** @type {number} */ px) => (context.font = `${px}px ${colours.mono}`);
  const [title, , figures] = linesOf(node);
  const mark = node.module ? "▸" : markOf(node);
  const texts = [mark ? `${mark} ${title}` : title, savedMark(node) + figures].slice(0, (rect.h * scale) / 13);
  font(CAPTION_PX);
  const shown = texts.map((text) => cut(context, text, rect.w * scale - 6));
  font(CAPTION_PX / scale);
  context.textBaseline = "middle";
  context.fillStyle = node.module || isHeat ? colours.text : colours.onHue;
  for (const [at, text] of shown.entries()) context.fillText(text, rect.x + 3 / scale, rect.y + (rect.h * (at + 1)) / (shown.length + 1));
}

/** @param {CanvasRenderingContext2D} context @param {Node} node @param {Rect} rect @param {Scene} scene */
function write(context, node, rect, scene) {
  const { colours, isHeat, keys } = scene;
  const [title, name, figures] = linesOf(node);
  const mark = scene.markOf(node);
  const hasStripe = !node.module && !isHeat;
  const left = rect.x + (hasStripe ? STRIPE + 7 : 9);
  const room = rect.x + rect.w - left - 6;
  context.textBaseline = "middle";
  context.font = `${FONT.title} ${colours.mono}`;
  if (hasStripe) {
    context.fillStyle = colours.onHue;
    context.textAlign = "center";
    context.fillText(letter(keys.get(keyOf(node.ops[0])) ?? 0), rect.x + STRIPE / 2, rect.y + rect.h / 2);
    context.textAlign = "left";
  }
  context.fillStyle = mark === "+" ? colours.good : mark === "~" ? colours.warn : colours.bad;
  if (mark) context.fillText(mark, rect.x + rect.w - 14, rect.y + 11);
  context.fillStyle = colours.text;
  context.fillText(cut(context, node.module ? `▸ ${title}` : title, room - (mark ? 12 : 0)), left, rect.y + 11);
  context.font = `${FONT.text} ${colours.mono}`;
  context.fillStyle = colours.soft;
  context.fillText(cut(context, name, room), left, rect.y + 24);
  context.font = `${FONT.text} ${colours.sans}`;
  context.fillStyle = isHeat ? colours.text : colours.soft;
  context.fillText(cut(context, savedMark(node) + figures, room), left, rect.y + 37);
}

/** @param {Node} node */
function savedMark(node) {
  return node.phase === "forward" && !node.module && node.saved.size > 0 ? "◆ " : "";
}

/** Where each text was cut at a width. @type {Map<string, string>} */
const cuts = new Map();

/** @param {CanvasRenderingContext2D} context @param {string} text @param {number} width */
function cut(context, text, width) {
  const id = `${context.font} ${Math.round(width)} ${text}`;
  const done = cuts.get(id);
  if (done !== undefined) return done;
  let end = text.length;
  while (end > 0 && context.measureText(end < text.length ? `${text.slice(0, end)}…` : text).width > width) end -= 1;
  const found = end < text.length ? `${text.slice(0, end)}…` : text;
  // Views of many payloads share one page.
  if (cuts.size > 20_000) cuts.clear();
  cuts.set(id, found);
  return found;
}

/** Which column is which. @param {CanvasRenderingContext2D} context @param {Scene} scene @param {number} ratio */
export function paintHeads(context, { layout, camera, size, colours }, ratio) {
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.fillStyle = colours.bg;
  context.fillRect(0, 0, size.w, HEAD);
  context.fillStyle = colours.line;
  context.fillRect(0, HEAD, size.w, 1);
  context.fillStyle = colours.soft;
  context.font = `${FONT.title} ${colours.sans}`;
  context.textBaseline = "middle";
  context.textAlign = "center";
  for (const [phase, text] of /** @type {const} */ ([["forward", "Forward ↓"], ["backward", "Backward ↑"], ["update", "Update ↓"]])) {
    if (Number.isNaN(layout.axes[phase])) continue;
    const at = (layout.axes[phase] - camera.x) * camera.scale;
    const room = context.measureText(text).width / 2 + 8;
    context.fillText(text, clamp(at, room, size.w - room), HEAD / 2 + 0.5);
  }
  context.textAlign = "left";
}

/** All of the graph in one strip. @param {CanvasRenderingContext2D} context @param {Scene} scene @param {Rect} strip @param {number} ratio */
export function paintMap(context, scene, strip, ratio) {
  const { layout, colours, keys, isHeat, most } = scene;
  const [sx, sy] = [strip.w / Math.max(1, layout.w), strip.h / Math.max(1, layout.h)];
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.fillStyle = colours.raised;
  context.fillRect(0, 0, strip.w, strip.h);
  for (const node of layout.nodes.values()) {
    context.globalAlpha = scene.isDim(node) ? 0.2 : isHeat ? 0.12 + heat(nodeTime(node), most) : 1;
    const key = node.module ? partsOf(node)[0]?.key : keyOf(node.ops[0]);
    context.fillStyle = isHeat ? colours.heat : colours[`k${(keys.get(key ?? "") ?? 0) % HUES}`];
    context.fillRect((node.x - layout.x) * sx, node.y * sy, node.w * sx, Math.max(1, node.h * sy - 0.5));
  }
  context.globalAlpha = 1;
}
