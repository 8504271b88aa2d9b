// The canvas's camera, and what moves it.

import { bounded, fitWidth, revealed, zoomed } from "./camera.js";

/** @typedef {import("./camera.js").Camera} Camera @typedef {import("./camera.js").Rect} Rect @typedef {{ x: number, y: number }} Point */

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
