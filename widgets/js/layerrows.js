// The rows of the layers table, folded and sorted. No DOM.

import { foldedPaths, nothing, time } from "./modules.js";

/** @typedef {import("./modules.js").Pair} Pair @typedef {import("./modules.js").Tree} Tree */

/**
 * Own ops of a module, those of the modules inside not counted; of several identical ones, their sum.
 * @typedef {object} Layer
 * @property {string} path "*" for the numbers of folded layers
 * @property {string} type
 * @property {Pair} forward µs
 * @property {Pair} backward µs
 * @property {number} saved bytes
 * @property {string} cause what takes most of the backward
 * @property {string[]} modules paths
 */

/** @typedef {"path" | "type" | "forward" | "backward" | "ratio" | "share" | "change" | "saved" | "cause"} Column */

const OUTSIDE = "outside modules";

/** Those that take time or save anything. @param {Payload} payload @returns {Layer[]} */
export function layersOf({ layers }) {
  const rows = layers.map((row) => ({
    path: row.path || row.module_type || OUTSIDE,
    type: row.module_type,
    forward: row.forward_us,
    backward: row.backward_us,
    saved: row.saved_bytes[1],
    cause: row.cause,
    modules: row.path || row.module_type ? [row.path] : [],
  }));
  return rows.filter((row) => stepTime(row, 0) > 0 || stepTime(row) > 0 || row.saved > 0);
}

/** Whether a value whose home this is counts for the row; those outside of any module have a row of their own. @param {Layer} layer @param {import("./modules.js").Branch} home */
export function isIn({ modules }, home) {
  const isOutside = home.kind === "line" && home.parent === null;
  return isOutside ? modules.length === 0 : modules.includes(home.path);
}

/** Identical layers as one row. @param {Layer[]} rows @param {Tree} tree @returns {Layer[]} */
export function folded(rows, tree) {
  const paths = foldedPaths(tree);
  /** @type {Map<string, Layer[]>} */
  const groups = new Map();
  for (const row of rows) {
    const path = (row.modules[0] && paths.get(row.modules[0])) || row.path;
    groups.set(path, [...(groups.get(path) ?? []), row]);
  }
  return [...groups].map(([path, some]) => (some.length === 1 ? some[0] : together(path, some)));
}

/** @param {string} path @param {Layer[]} some @returns {Layer} */
function together(path, some) {
  const slowest = some.reduce((most, row) => (row.backward[1] > most.backward[1] ? row : most));
  const sum = (/** @type {"forward" | "backward"} */ of) => /** @type {Pair} */ ([0, 1].map((at) => some.reduce((total, row) => total + row[of][at], 0)));
  const saved = some.reduce((total, row) => total + row.saved, 0);
  return { ...slowest, path, forward: sum("forward"), backward: sum("backward"), saved, modules: some.flatMap((row) => row.modules) };
}

/** What a column sorts by. @type {Record<Column, (row: Layer) => number | string>} */
export const KEYS = {
  path: (row) => row.path,
  type: (row) => row.type,
  forward: (row) => row.forward[1],
  backward: (row) => row.backward[1],
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

/** "Backward is 2.3× forward; head takes 38 % of it (matmul)." @param {Layer[]} rows */
export function answer(rows) {
  const total = (/** @type {"forward" | "backward"} */ of) => rows.reduce((sum, row) => sum + row[of][1], 0);
  const [forward, backward] = [total("forward"), total("backward")];
  if (backward === 0) return forward === 0 ? "No op of this trace has a time." : "Nothing here takes time in the backward.";
  const most = rows.reduce((one, other) => (other.backward[1] > one.backward[1] ? other : one));
  const times = most.modules.length > 1 ? ` ×${most.modules.length}` : "";
  const cause = most.cause && ` (${most.cause.replace(/ \d+ %$/, "")})`;
  const share = `${most.path}${times} takes ${Math.round((100 * most.backward[1]) / backward)} % of it${cause}.`;
  return forward === 0 ? `All of the step is backward; ${share}` : `Backward is ${(backward / forward).toFixed(1)}× forward; ${share}`;
}
