// The Graph tab: modules and ops as boxes, the forward facing the backward, and the tensors that are saved in between.

import { colours, onTheme } from "../parts/theme.js";
import { GraphFrame, MAP_WIDTH } from "./frame.js";
import { listen } from "./input.js";
import { foldedLayer, layOut, nodeOfValue, PHASES, showMember } from "./layout.js";
import { buildProgram, levels } from "./modules.js";
import { Motion } from "./motion.js";
import { paint, paintHeads, paintMap } from "./paint.js";
import { shares, spoken, timeOf, tooltip } from "./text.js";
import { overlaps, Viewport } from "./viewport.js";
import { nearestNode } from "./walk.js";

/** @typedef {import("./layout.js").Node} Node @typedef {import("./layout.js").Box} Box */

const DEPTH = 2;

/** @implements {Panel} */
export class GraphPanel {
  /** @param {Act} act */
  constructor(act) {
    this.act = act;
    /** @type {View | null} */
    this.view = null;
    this.program = buildProgram(/** @type {any} */ ({ values: {}, memory: { before: { ops: [] }, after: { ops: [] } } }), { views: false, removed: false });
    /** @type {import("./layout.js").Folding} */
    this.folding = { depth: DEPTH, opened: new Set(), closed: new Set(), fold: true, shown: new Set() };
    this.layout = layOut(this.program, this.folding);
    this.motion = new Motion();
    this.port = new Viewport(() => this.invalidate());
    /** @type {Node | null} */
    this.cursor = null;
    this.selected = "";
    /** Colours stay with what they are of while passes are switched. @type {Map<string, number>} */
    this.keys = new Map();
    /** @type {Map<string, string>} */
    this.marks = new Map();
    this.most = 0;
    this.due = 0;
    this.isMapDrawn = false;
    /** @type {Record<string, string>} */
    this.colours = {};
    this.frame = new GraphFrame({
      deeper: (by) => this.setDepth(this.folding.depth + by),
      expandAll: () => this.setDepth(Infinity),
      collapseAll: () => this.setDepth(1),
      zoom: (factor) => this.port.zoom(factor),
      fit: () => this.port.fit(),
      recolour: () => this.recolour(),
      onSwitch: (id) => this.onSwitch(id),
    });
    this.element = this.frame.element;
    // For tests: where something is, in client pixels.
    Object.assign(this.frame.canvas, { locate: (/** @type {string} */ id) => this.locate(id) });
    this.resizing = new ResizeObserver(() => this.resize());
    this.resizing.observe(this.frame.stage);
    this.stopTheme = onTheme(() => this.recolour());
    this.stopInput = listen(this);
  }

  /** @param {View} view */
  draw(view) {
    const isSame = this.view?.payload === view.payload;
    this.view = view;
    if (!isSame) this.rebuild();
  }

  /** @param {View} view */
  mark(view) {
    if (view.matches !== this.view?.matches) this.isMapDrawn = false;
    this.view = view;
    if (view.selected !== this.selected) this.find(view.selected);
    this.invalidate();
  }

  destroy() {
    this.resizing.disconnect();
    this.stopTheme();
    this.stopInput();
    cancelAnimationFrame(this.due);
  }

  /** @param {string} id */
  onSwitch(id) {
    if (id === "links") return this.invalidate();
    this.folding.fold = this.frame.fold.checked;
    if (id === "fold") return this.arrange(null);
    this.rebuild();
  }

  rebuild() {
    if (!this.view) return;
    const { payload } = this.view;
    this.program = buildProgram(payload, { views: this.frame.views.checked, removed: this.frame.removed.checked });
    this.marks = new Map([payload.forward, payload.backward, payload.update].flatMap((part) => part?.lines ?? []).filter((line) => line.kind === "op" && "+~".includes(line.diff)).map((line) => [line.value, line.diff]));
    for (const { key } of shares(this.program.ops)) if (!this.keys.has(key)) this.keys.set(key, this.keys.size);
    this.arrange(null);
  }

  /** Lay out again; what was at `anchor`, or else the cursor or what was in the middle, stays under the reader's eyes. @param {{ from: Node | Box, to: () => Node | Box | undefined } | null} anchor */
  arrange(anchor) {
    const before = this.layout;
    const kept = anchor?.from ?? this.kept();
    this.layout = layOut(this.program, this.folding);
    const found = anchor ? anchor.to() : kept && this.layout.nodes.get(/** @type {Node} */ (kept).id);
    const shift = kept && found ? { x: found.x - kept.x, y: found.y - kept.y } : { x: 0, y: 0 };
    this.port.follow(this.layout, shift);
    this.motion.begin(before, this.layout, shift);
    const times = [...this.layout.nodes.values()].map((node) => timeOf(node.ops) ?? 0);
    this.most = times.reduce((most, one) => Math.max(most, one), 0);
    this.frame.depth.textContent = `depth ${Math.min(this.folding.depth, levels(this.program.root) + 1)}`;
    this.cursor = (this.cursor && this.layout.nodes.get(this.cursor.id)) ?? nodeOfValue(this.selected, this.program, this.layout);
    this.drawLegend();
    this.isMapDrawn = false;
    this.invalidate();
  }

  /** What should stay where it is: the cursor if it is in view, else what is nearest to the view's middle and still there. */
  kept() {
    const { port, cursor } = this;
    if (!port.camera) return null;
    if (cursor && overlaps(cursor, port.seen()) && this.stays(cursor)) return cursor;
    return nearestNode(this.layout, port.middle(), this.stays);
  }

  /** @param {Node} node */
  stays = (node) => node.module !== null || this.program.host.get(node.id)?.name === node.id;

  /** @param {number} depth */
  setDepth(depth) {
    this.folding.depth = Math.max(1, Math.min(levels(this.program.root) + 1, depth));
    this.folding.opened.clear();
    this.folding.closed.clear();
    if (!this.selected) this.folding.shown.clear();
    this.arrange(null);
  }

  /** Open a collapsed module, or collapse an open one. @param {Box} box */
  toggleBox(box) {
    const [{ path }] = box.members;
    const { opened, closed } = this.folding;
    (box.isOpen ? opened : closed).delete(path);
    (box.isOpen ? closed : opened).add(path);
    const half = () => this.halfOf(box.module.path);
    const from = box.isOpen ? box : half();
    if (from) this.arrange({ from, to: () => (box.isOpen ? half() : this.layout.boxes.find((one) => one.module === box.module)) });
    if (!this.cursor) this.setCursor(box.isOpen ? (half() ?? null) : this.firstIn(box));
  }

  /** The node of a collapsed module that stands first. @param {string} path */
  halfOf(path) {
    return PHASES.map((phase) => this.layout.nodes.get(`${path}|${phase}`)).find(Boolean);
  }

  /** @param {Box} box */
  firstIn({ module }) {
    const box = this.layout.boxes.find((one) => one.module === module);
    return box ? nearestNode(this.layout, box, ({ x, y }) => x > box.x && y > box.y) : null;
  }

  /** Put the cursor where the selected value is; of folded layers, show the one that it is in. @param {string} selected */
  find(selected) {
    this.selected = selected;
    const op = this.program.host.get(this.selected);
    const away = op && !this.layout.nodeOf.has(op) ? foldedLayer(op, this.layout) : null;
    const box = away && this.layout.boxes.find(({ members }) => members.includes(away));
    if (box) {
      showMember(box, away, this.folding);
      this.arrange(null);
    }
    this.setCursor(nodeOfValue(this.selected, this.program, this.layout));
  }

  /** @param {Node | null} node */
  setCursor(node) {
    this.cursor = node;
    this.frame.live.textContent = node && this.view ? spoken(node, this.view.payload) : "";
    if (node) this.port.reveal(node);
    this.invalidate();
  }

  /** Move the cursor; an op is selected in every panel. @param {Node | null} node */
  moveTo(node) {
    this.setCursor(node);
    if (node?.module) return;
    this.selected = node?.id ?? "";
    this.act.select(this.selected);
  }

  /** Nodes of the cursor's twins; of a collapsed module, its other half. @param {Node | null} node */
  twinsOf(node) {
    if (!node) return [];
    const { nodes } = this.layout;
    const other = node.phase === "forward" ? "backward" : "forward";
    const half = node.module && nodes.get(`${node.module.module.path}|${other}`);
    if (node.module) return half ? [half] : [];
    return this.nodesOf(node.ops[0].value.twins).filter(({ phase }) => phase === other);
  }

  /** @param {string[]} values @returns {Node[]} */
  nodesOf(values) {
    return values.flatMap((name) => nodeOfValue(name, this.program, this.layout) ?? []);
  }

  /** @param {Node} node */
  isDim(node) {
    const matches = this.view?.matches;
    return Boolean(matches && !node.ops.some(({ name, items }) => matches.has(name) || items.some((item) => matches.has(item))));
  }

  /** @param {Node} node */
  markOf(node) {
    if (node.module) return "";
    const [{ name, items, value }] = node.ops;
    if (value.removed) return "−";
    return this.marks.get(name) ?? (items.some((item) => this.marks.has(item)) ? "~" : "");
  }

  /** @param {string} id a value, `path|phase` of a collapsed module, or the path of any: of an open one, its ▾ */
  locate(id) {
    const { nodes, boxes } = this.layout;
    const box = boxes.find((one) => one.isOpen && one.module.path === id);
    const node = nodes.get(id) ?? this.halfOf(id) ?? nodeOfValue(id, this.program, this.layout);
    const point = node ? { x: node.x + node.w / 2, y: node.y + node.h / 2 } : box && { x: box.x + 14, y: box.y + 14 };
    const at = point && this.port.onScreen(point);
    const frame = this.frame.canvas.getBoundingClientRect();
    return at ? { x: frame.left + at.x, y: frame.top + at.y } : null;
  }

  resize() {
    const size = this.frame.resize();
    if (!size) return;
    this.isMapDrawn = false;
    // The theme may have changed while another tab was open.
    this.recolour();
    this.port.resize(size);
    this.paint();
  }

  recolour() {
    if (!this.element.isConnected) return;
    this.colours = colours(this.frame.stage);
    this.isMapDrawn = false;
    this.drawLegend();
    this.invalidate();
  }

  invalidate() {
    this.due ||= requestAnimationFrame(() => this.paint());
  }

  paint() {
    cancelAnimationFrame(this.due);
    this.due = 0;
    const { view } = this;
    const { camera } = this.port;
    const context = this.frame.canvas.getContext("2d", { alpha: false });
    if (!camera || !context || !view) return;
    const scene = this.scene(camera);
    paint(context, scene, devicePixelRatio);
    paintHeads(context, scene, devicePixelRatio);
    this.paintMap(scene);
    if (scene.moved < 1) this.invalidate();
  }

  /** @param {import("./viewport.js").Camera} camera @returns {import("./lines.js").Scene} */
  scene(camera) {
    const { layout, colours, keys, most, cursor, motion } = this;
    const moved = motion.moved();
    const state = { layout, camera, size: this.port.size, colours, keys, most, cursor, moved, entering: motion.entering, leaving: moved < 1 ? motion.leaving : [] };
    return {
      ...state,
      isHeat: this.frame.isHeat,
      hasLinks: this.frame.links.checked,
      near: new Set(cursor ? [...cursor.inputs, ...cursor.readers, ...cursor.saved] : this.nodesOf(this.view?.payload.values[this.selected]?.uses ?? [])),
      twins: new Set(this.twinsOf(cursor)),
      isDim: (node) => this.isDim(node),
      markOf: (node) => this.markOf(node),
      rectOf: moved < 1 ? (one) => motion.rectOf(one, moved) : (one) => one,
    };
  }

  /** @param {import("./lines.js").Scene} scene */
  paintMap(scene) {
    const context = this.frame.map.getContext("2d");
    const { camera, size, layout } = scene;
    const strip = { x: 0, y: 0, w: MAP_WIDTH, h: size.h };
    if (context && !this.isMapDrawn) paintMap(context, scene, strip, devicePixelRatio);
    this.isMapDrawn = true;
    const top = Math.max(0, (camera.y / layout.h) * size.h);
    const bottom = Math.min(size.h, ((camera.y + size.h / camera.scale) / layout.h) * size.h);
    this.frame.showWindow(top, bottom - top);
  }

  drawLegend() {
    if (this.frame.isHeat) this.frame.showHeat(this.most, this.view?.payload.times.after ?? "");
    else this.frame.showKeys(shares(this.program.ops), this.keys);
  }

  /** @param {Node | null} node @param {{ clientX: number, clientY: number }} event */
  showTip(node, event) {
    this.frame.showTip(node && this.view ? tooltip(node, this.view.payload) : [], event);
  }
}
