// HTML elements from data, and numbers as text. Text always goes in as text nodes: no string of a session is ever parsed as HTML.

/**
 * `h("button", { class: "x", onclick: f, "aria-pressed": "true" }, "label", child)`.
 * Null, undefined and false attributes and children are left out. What stands in backticks is shown as code, but in code.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Record<string, any> | null} [attributes]
 * @param {...(Node | string | number | null | undefined | false | (Node | string)[])} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function" || name === "value" || name === "checked" || name === "disabled") {
      /** @type {any} */ (element)[name] = value;
    } else {
      element.setAttribute(name, value === true ? "" : name === "title" || name === "aria-label" ? plain(value) : String(value));
    }
  }
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    const parts = /** @type {(Node | string)[]} */ (child instanceof Node || tag === "code" ? [child] : String(child).split("`"));
    element.append(...parts.map((part, at) => (at % 2 ? h("code", null, part) : part)));
  }
  return element;
}

/** Without the marks of code. @param {unknown} text */
export const plain = (text) => String(text).replaceAll("`", "");

/** @param {number} count */
export function formatBytes(count) {
  const sign = count < 0 ? "−" : "";
  let left = Math.abs(count);
  for (const unit of ["B", "KiB", "MiB"]) {
    if (left < 1024) return `${sign}${short(left)} ${unit}`;
    left /= 1024;
  }
  return `${sign}${short(left)} GiB`;
}

/** Units of bytes and of µs, the smallest first. @type {[number, string][]} */
export const sizes = [[1, "B"], [2 ** 10, "KiB"], [2 ** 20, "MiB"], [2 ** 30, "GiB"]];
/** @type {[number, string][]} */
export const spans = [[1e-3, "ns"], [1, "µs"], [1e3, "ms"], [1e6, "s"]];

/** Two amounts in the unit of the larger one, and that: `[["3.67", "3.36"], "MiB"]`. @param {[number, number]} amounts @param {[number, string][]} units @returns {[[string, string], string]} */
export function paired([one, other], units) {
  const most = Math.max(Math.abs(one), Math.abs(other));
  const [size, unit] = units.filter(([from]) => most >= from).at(-1) ?? units[most === 0 ? Math.min(1, units.length - 1) : 0];
  const text = (/** @type {number} */ amount) => (units === sizes ? short(amount / size) : figure(amount / size));
  return [[text(one), text(other)], unit];
}

/** Three significant digits, without an exponent. @param {number} number */
export function short(number) {
  if (number === 0) return "0";
  const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(number))));
  return number.toFixed(Math.min(digits, 3)).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

/** Three significant digits with their zeros, for columns of figures: "9.30", "10.3", "104"; "<0.0001" of what is less. @param {number} number */
export function figure(number) {
  if (number === 0) return "0";
  if (number > 0 && number < 1e-4) return "<0.0001";
  return number.toFixed(Math.min(4, Math.max(0, 2 - Math.floor(Math.log10(Math.abs(number))))));
}

const ENOUGH = 8; // MIN_ROUNDS of tracefuse.measure.timing

/** The interval of an estimate, "1.2–1.3", or that there is one sample. @param {Interval} estimate @param {(number: number) => string} format */
export function bounds({ low, high, coverage, samples }, format) {
  if (samples === 1) return "one sample";
  return `${format(low)}–${format(high)}${samples < ENOUGH ? ` (${Math.round(100 * coverage)} %, ${samples} samples)` : ""}`;
}

/** "12.3 µs", "1.25 ms". @param {number} us */
export const formatTime = (us) => (us > 0 && us < 1e-3 ? "<1 ns" : us >= 1000 ? `${figure(us / 1000)} ms` : `${figure(us)} µs`);

/** @param {number} seconds */
export function formatSeconds(seconds) {
  return seconds < 1 ? `${short(seconds * 1000)} ms` : `${short(seconds)} s`;
}

/** "−34 %", "+2 %", "±0 %"; empty where there is nothing to compare with. @param {number} before @param {number} after */
export function formatChange(before, after) {
  if (!before) return "";
  const percent = Math.round((100 * (after - before)) / before);
  if (percent === 0) return before === after ? "unchanged" : "±0 %";
  return `${percent < 0 ? "−" : "+"}${Math.abs(percent)} %`;
}

/** A signed whole number with a real minus. @param {number} count */
export function signed(count) {
  return count === 0 ? "±0" : count < 0 ? `−${-count}` : `+${count}`;
}

/** @param {number} count @param {string} one @param {string} [many] */
export function plural(count, one, many) {
  return `${count} ${count === 1 ? one : (many ?? one + "s")}`;
}

/** The control with this data-testid. @param {HTMLElement} inside @param {string} id @returns {HTMLElement | null} */
export function find(inside, id) {
  return inside.querySelector(`[data-testid="${CSS.escape(id)}"]`);
}

/** An id that no other view on the page has; each has its own copy of this module. @param {string} prefix */
export function unique(prefix) {
  return `${prefix}-${Math.random().toString(36).slice(2, 10)}`;
}
