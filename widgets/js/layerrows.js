// The rows of the layers table: Python's, or summed from the values where there are none. No DOM.

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

export const OUTSIDE = "outside modules";

/** Those that take time or save anything. @param {Payload} payload @param {Tree} tree @returns {Layer[]} */
export function layersOf(payload, tree) {
  const rows = payload.layers.length === 0 ? summed(payload, tree) : filled(payload);
  return rows.filter((row) => stepTime(row, 0) > 0 || stepTime(row) > 0 || row.saved > 0);
}

/** @param {Payload} payload @returns {Layer[]} */
function filled(payload) {
  return payload.layers.map((row) => ({
    path: row.path || row.module_type || OUTSIDE,
    type: row.module_type,
    forward: row.forward_us,
    backward: row.backward_us,
    saved: row.saved_bytes[1],
    cause: row.cause,
    modules: [row.path],
  }));
}

/** @param {Payload} payload @param {Tree} tree @returns {Layer[]} */
function summed(payload, tree) {
  const causes = causesOf(payload, tree);
  const rows = tree.modules.map(({ path, type, own }) => ({ path: path || type, type, ...own, cause: causes.get(path) ?? "", modules: [path] }));
  const left = structuredClone(tree.total);
  for (const at of /** @type {const} */ (["forward", "backward"])) {
    left[at] = /** @type {Pair} */ (left[at].map((us, i) => whole(us - rows.reduce((sum, row) => sum + row[at][i], 0))));
  }
  left.saved -= rows.reduce((sum, row) => sum + row.saved, 0);
  return [...rows, { path: OUTSIDE, type: "", ...left, cause: "", modules: [] }];
}

/** Differences of sums of floats end in digits that mean nothing. @param {number} us */
const whole = (us) => Math.max(0, Math.round(us * 1e6) / 1e6);

/** The kind of op that takes most of each module's own backward, and its share: "matmul 80 %". @param {Payload} payload @param {Tree} tree */
function causesOf({ values }, tree) {
  /** @type {Map<string, Map<string, number>>} */
  const found = new Map();
  for (const [name, home] of tree.home) {
    const value = values[name];
    const us = value.phase === "backward" ? (value.time_us[1] ?? 0) : 0;
    if (us === 0 || (home.kind === "line" && !home.parent)) continue;
    const kinds = found.get(home.path) ?? new Map();
    kinds.set(kindOf(value), (kinds.get(kindOf(value)) ?? 0) + us);
    found.set(home.path, kinds);
  }
  return new Map([...found].map(([path, kinds]) => [path, largest(kinds)]));
}

/** @param {Map<string, number>} kinds */
function largest(kinds) {
  const all = [...kinds].sort((one, other) => other[1] - one[1]);
  const total = all.reduce((sum, [, us]) => sum + us, 0);
  return `${all[0][0]} ${Math.round((100 * all[0][1]) / total)} %`;
}

/** @param {Value} value */
function kindOf({ op, kernel }) {
  if (kernel) return "fused kernel";
  const name = op.replace(/^aten\.(\w+).*$/, "$1");
  if (/^(addmm|b?mm|baddbmm|matmul|linear)$/.test(name)) return "matmul";
  return name.includes("attention") ? "attention" : name.replace(/^_+/, "");
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
