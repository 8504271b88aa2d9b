// The rows of the layers table, folded and sorted. It needs no DOM.

import { short } from "../parts/dom.js";
import { nothing, time } from "../parts/modules.js";

/** @typedef {import("../parts/modules.js").Pair} Pair */

/**
 * Own ops of a module, those of the modules inside not counted; of several identical ones, their sum.
 * @typedef {object} Layer
 * @property {string} path "*" for the numbers of folded layers
 * @property {string} fold equal for identical layers
 * @property {string} type
 * @property {Pair} forward µs
 * @property {Pair} backward µs
 * @property {Pair} update µs
 * @property {number} saved bytes
 * @property {string} cause what takes most of the backward
 * @property {[Kinds, Kinds]} kinds µs of the backward by kind of work
 * @property {[Pair, Pair]} flops of the matmuls, forward and backward, before and after
 * @property {string[]} modules paths
 */

/** @typedef {Record<string, number>} Kinds */

/** @typedef {"path" | "type" | "forward" | "backward" | "update" | "ratio" | "share" | "change" | "saved" | "cause"} Column */

/** Of `tracefuse.tables.folding`, in the order that bars show them. */
export const WORK = ["pointwise", "concatenation", "cast", "copy", "device copy", "matmul layout", "matmul", "convolution", "attention", "normalization", "reduction", "fused", "other"];
// As in `tracefuse.tables.layers`.
const OUT_OF_LINE = 1.5;

const OUTSIDE = "(no module)"; // As in `tracefuse.tables.folding`.

/** Those that take time or save anything. @param {Payload} payload @returns {Layer[]} */
export function layersOf({ layers }) {
  const rows = layers.map((row) => ({
    path: row.path || row.module_type || OUTSIDE,
    fold: row.folded || row.module_type || OUTSIDE,
    type: row.module_type,
    forward: row.forward_us,
    backward: row.backward_us,
    update: row.update_us,
    saved: row.saved_bytes[1],
    cause: row.cause,
    kinds: row.backward_kinds,
    flops: row.flops,
    modules: row.path || row.module_type ? [row.path] : [],
  }));
  return rows.filter((row) => stepTime(row, 0) > 0 || stepTime(row) > 0 || row.saved > 0);
}

/** Whether a value whose home this is counts for the row; those outside of any module have a row of their own. @param {Layer} layer @param {import("../parts/modules.js").Branch} home */
export function isIn({ modules }, home) {
  const isOutside = home.kind === "line" && home.parent === null;
  return isOutside ? modules.length === 0 : modules.includes(home.path);
}

/** Identical layers as one row. @param {Layer[]} rows @returns {Layer[]} */
export function folded(rows) {
  /** @type {Map<string, Layer[]>} */
  const groups = new Map();
  for (const row of rows) groups.set(row.fold, [...(groups.get(row.fold) ?? []), row]);
  return [...groups].map(([path, some]) => (some.length === 1 ? some[0] : together(path, some)));
}

/** @param {string} path @param {Layer[]} some @returns {Layer} */
function together(path, some) {
  const slowest = some.reduce((most, row) => (row.backward[1] > most.backward[1] ? row : most));
  const sum = (/** @type {"forward" | "backward" | "update"} */ of) => /** @type {Pair} */ ([0, 1].map((at) => some.reduce((total, row) => total + row[of][at], 0)));
  const saved = some.reduce((total, row) => total + row.saved, 0);
  const kinds = /** @type {[Kinds, Kinds]} */ ([0, 1].map((at) => added(some.map((row) => row.kinds[at]))));
  const flops = /** @type {[Pair, Pair]} */ ([0, 1].map((at) => [0, 1].map((half) => some.reduce((total, row) => total + row.flops[at][half], 0))));
  return { ...slowest, path, forward: sum("forward"), backward: sum("backward"), update: sum("update"), saved, kinds, flops, cause: parts(kinds[1], 1), modules: some.flatMap((row) => row.modules) };
}

/** @param {Kinds[]} some @returns {Kinds} */
function added(some) {
  return some.reduce((sums, one) => {
    for (const [kind, us] of Object.entries(one)) sums[kind] = (sums[kind] ?? 0) + us;
    return sums;
  }, /** @type {Kinds} */ ({}));
}

/** "pointwise 55 %, matmul 40 %": the largest first. @param {Kinds} kinds @param {number} [most] */
export function parts(kinds, most = WORK.length) {
  const total = Object.values(kinds).reduce((sum, us) => sum + us, 0);
  const sorted = Object.entries(kinds).filter(([, us]) => us > 0).sort(([, one], [, other]) => other - one);
  return sorted.slice(0, most).map(([kind, us]) => `${kind} ${Math.round((100 * us) / total)} %`).join(", ");
}

/** Backward over forward by the FLOPs; 0 where the forward has no matmul. @param {Layer} row @param {0 | 1} [at] */
export function expected({ flops }, at = 1) {
  const [forward, backward] = flops[at];
  return forward ? backward / forward : 0;
}

/** As captured: a fused kernel's time is its first module's, whoever's the work. @param {Layer} row */
export function isOutOfLine(row) {
  const ratio = expected(row, 0);
  return ratio > 0 && row.forward[0] > 0 && row.backward[0] >= OUT_OF_LINE * ratio * row.forward[0];
}

/** The row whose backward takes most beyond what its FLOPs explain, if that is a twentieth of all backward or more. @param {Layer[]} rows @returns {Layer | undefined} */
export function outOfLine(rows) {
  const total = rows.reduce((sum, row) => sum + row.backward[0], 0);
  const excess = (/** @type {Layer} */ row) => row.backward[0] - expected(row, 0) * row.forward[0];
  const [most] = rows.filter((row) => isOutOfLine(row) && excess(row) > total / 20).sort((one, other) => excess(other) - excess(one));
  return most;
}

/** What a column sorts by. @type {Record<Column, (row: Layer) => number | string>} */
export const KEYS = {
  path: (row) => row.path,
  type: (row) => row.type,
  forward: (row) => row.forward[1],
  backward: (row) => row.backward[1],
  update: (row) => row.update[1],
  ratio: (row) => (row.forward[1] ? row.backward[1] / row.forward[1] : 0),
  share: (row) => stepTime(row),
  change: (row) => stepTime(row) - stepTime(row, 0),
  saved: (row) => row.saved,
  cause: (row) => row.cause,
};

/** @param {Layer} row @param {0 | 1} [at] */
export const stepTime = (row, at = 1) => time({ ...nothing(), ...row }, at);

/** Equal ones stay in the forward's order. @param {Layer[]} rows @param {Column} column @param {boolean} descending */
export function sorted(rows, column, descending) {
  const key = KEYS[column];
  const sign = descending ? -1 : 1;
  return [...rows].sort((one, other) => {
    const [a, b] = [key(one), key(other)];
    return sign * (typeof a === "string" ? a.localeCompare(String(b), "en", { numeric: true }) : a - Number(b));
  });
}

/** "Backward is 2.3× forward; that of head takes 25 % of the step (matmul)." @param {Layer[]} rows @param {string} [whole] */
export function answer(rows, whole = "the step") {
  const total = (/** @type {"forward" | "backward"} */ of) => rows.reduce((sum, row) => sum + row[of][1], 0);
  const [forward, backward] = [total("forward"), total("backward")];
  if (backward === 0) return forward === 0 ? "No op of this trace has a time." : "Nothing here takes time in the backward.";
  const most = rows.reduce((one, other) => (other.backward[1] > one.backward[1] ? other : one));
  const odd = outOfLine(rows);
  const cause = most.cause && ` (${most.cause.replace(/ \d+ %$/, "")})`;
  const out = odd ? ` ${odd === most ? "That" : named(odd)} is out of line as captured: ${over(odd)}× its forward, its matmuls ${short(expected(odd, 0))}×.` : "";
  const step = rows.reduce((sum, row) => sum + stepTime(row), 0);
  const share = `that of ${named(most)} takes ${Math.round((100 * most.backward[1]) / step)} % of ${whole}${cause}.${out}`;
  return forward === 0 ? `All of ${whole} is backward; ${share}` : `Backward is ${(backward / forward).toFixed(1)}× forward; ${share}`;
}

/** @param {Layer} row */
function named({ path, modules }) {
  return modules.length > 1 ? `${path} ×${modules.length}` : path;
}

/** @param {Layer} row */
function over(row) {
  return (row.backward[0] / row.forward[0]).toFixed(1);
}
