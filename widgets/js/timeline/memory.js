// Live memory on the time axis: when each op of the static profile runs, and the most bytes alive in a range. It needs no DOM.

import { first, isGpu } from "./events.js";

/** @typedef {import("./events.js").Program} Program */

/**
 * What is alive when: op `i` of `ops` has `live[i]` bytes from `at[i]` to `at[i + 1]`, the last one to `end`.
 * @typedef {{ ops: string[], live: number[], at: Float64Array, end: number, purposes: Float64Array[] }} Profile
 */

/**
 * When each op runs: where its first event starts, on the GPU's lanes if there are any, since what the host issues early runs
 * there in order. An op without an event runs when the one before it has ended. Null where the program has not these ops.
 * @param {Program} program @param {Memory} memory @returns {Profile | null}
 */
export function profile(program, memory) {
  const { ops, live } = memory;
  if (ops.length === 0 || !isOf(program, ops)) return null;
  const { columns, lanes, span } = program;
  const onGpu = lanes.some(isGpu);
  const isClock = lanes.map((lane) => (onGpu ? isGpu(lane) : lane.kind === "cpu"));
  const event = new Int32Array(ops.length).fill(-1);
  for (let i = columns.value.length - 1; i >= 0; i -= 1) {
    if (columns.value[i] > 0 && isClock[columns.lane[i]]) event[columns.value[i] - 1] = i;
  }
  const at = new Float64Array(ops.length);
  let last = 0;
  let ended = 0;
  for (let i = 0; i < ops.length; i += 1) {
    const found = event[i];
    last = Math.max(last, found < 0 ? ended : columns.start[found]);
    at[i] = last;
    if (found >= 0) ended = columns.start[found] + columns.duration[found];
  }
  return { ops, live, at, end: span, purposes: byPurpose(memory) };
}

/** Whether a program's events are of these ops. @param {{ values: string[] }} program @param {string[]} ops */
export function isOf({ values }, ops) {
  return values.length === ops.length && values.every((name, i) => name === ops[i]);
}

/** The op with the most bytes alive from `from` to `to`: its index, or -1 after the end. @param {Profile} profile @param {number} from @param {number} to */
export function highest({ live, at, end }, from, to) {
  if (from >= end || to < 0) return -1;
  const begin = first(at.length, (i) => at[i] >= from);
  // Ops that take no time begin where the next one does: none of them may be passed over.
  let found = at[begin] === from ? begin : Math.max(0, begin - 1);
  for (let i = found + 1; i < at.length && at[i] < to; i += 1) if (live[i] > live[found]) found = i;
  return found;
}

/** The outline in a window, one op per pixel: that with the most bytes alive in it, -1 after the end. @param {Profile} profile @param {{ from: number, to: number }} window @param {number} pixels */
export function outline(profile, { from, to }, pixels) {
  const step = (to - from) / pixels;
  return Int32Array.from({ length: pixels }, (_, x) => highest(profile, from + x * step, from + (x + 1) * step));
}

/** What storages are there for, as `tracefuse.optimizers.liveness` has them, and the colour of each. */
export const PURPOSES = [
  { id: "input", label: "inputs, parameters", colour: "lineStrong" },
  { id: "state", label: "optimizer state", colour: "brand" },
  { id: "saved", label: "saved for backward", colour: "twin" },
  { id: "gradient", label: "gradients", colour: "number" },
  { id: "result", label: "results", colour: "string" },
  { id: "temporary", label: "temporaries", colour: "warn" },
];

/** Bytes alive while each op runs, one column per purpose. @param {Pick<Memory, "ops" | "inputs" | "storages">} memory @returns {Float64Array[]} */
export function byPurpose({ ops, inputs, storages }) {
  const columns = PURPOSES.map(() => new Float64Array(ops.length + 1));
  columns[0][0] = inputs;
  for (let i = 0; i < storages.length; i += 4) {
    columns[storages[i + 3]][storages[i]] += storages[i + 2];
    columns[storages[i + 3]][storages[i + 1] + 1] -= storages[i + 2];
  }
  for (const column of columns) for (let op = 1; op < column.length; op += 1) column[op] += column[op - 1];
  return columns.map((column) => column.subarray(0, ops.length));
}

/** The storages made by ops that are alive while one runs, the largest first: the op that made each, its bytes, its purpose. @param {Pick<Memory, "ops" | "storages">} memory @param {number} op @returns {[string, number, number][]} */
export function aliveAt({ ops, storages }, op) {
  /** @type {[string, number, number][]} */
  const found = [];
  for (let i = 0; i < storages.length; i += 4) {
    const [start, end, bytes, purpose] = storages.slice(i, i + 4);
    if (start <= op && op <= end) found.push([ops[start], bytes, purpose]);
  }
  return found.sort(([, one], [, other]) => other - one);
}
