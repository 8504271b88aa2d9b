// The rows of the step: Triton's kernels and the operators of libraries in one list that sums to it. It needs no DOM.

/** @typedef {"name" | "calls" | "bytes" | "time" | "gain"} KernelKey */

/**
 * A kernel or an operator on operands of one type, with all its calls in a step.
 * @typedef {object} Row
 * @property {string} id
 * @property {string} said
 * @property {number} calls
 * @property {number} nbytes of one call
 * @property {number | null} us of one call
 * @property {number | null} step µs of all calls
 * @property {TimeKind | ""} kind
 * @property {KernelRecord["bound"]} bound
 * @property {number | null} share of the peak
 * @property {number | null} gain the time of what it stands for, over its own
 * @property {KernelRecord | null} kernel of Triton; null of an operator
 * @property {AtenRecord | null} library
 */

/** Bytes that one launch moves. @param {KernelRecord} kernel */
export function moved(kernel) {
  return kernel.nbytes_read + kernel.nbytes_written;
}

/** @param {{ kernels: KernelRecord[], aten: AtenRecord[] }} payload @returns {Row[]} */
export function rowsOf({ kernels, aten }) {
  return [...kernels.map((one) => ofKernel(one)), ...aten.map((one, at) => ofLibrary(one, at))];
}

/** @param {KernelRecord} one @returns {Row} */
function ofKernel(one) {
  const step = one.time_us === null ? null : one.time_us * one.calls;
  const gain = one.replaces?.us && step ? one.replaces.us / step : null;
  return { id: one.name, said: one.said, calls: one.calls, nbytes: moved(one), us: one.time_us, step, kind: one.kind, bound: one.bound, share: one.peak_share, gain, kernel: one, library: null };
}

/** @param {AtenRecord} one @param {number} at @returns {Row} */
function ofLibrary(one, at) {
  return { id: `library ${at}`, said: one.said, calls: one.calls, nbytes: one.nbytes, us: one.time_us, step: one.time_us * one.calls, kind: one.kind, bound: one.bound, share: one.peak_share, gain: null, kernel: null, library: one };
}

/** @type {Record<KernelKey, (row: Row) => number | string | null>} */
const KEYS = { name: (row) => row.said, calls: (row) => row.calls, bytes: (row) => row.nbytes * row.calls, time: (row) => row.step, gain: (row) => row.gain };

/**
 * A sorted copy: the most first or, if `ascending`, the least; what has no figure last, equal ones in their order.
 * @param {Row[]} rows @param {KernelKey} key @param {boolean} ascending
 */
export function sorted(rows, key, ascending) {
  const of = KEYS[key];
  return [...rows].sort((one, other) => {
    const [a, b] = [of(one), of(other)];
    if (a === b) return 0;
    if (a === null) return 1;
    if (b === null) return -1;
    return (a < b) === ascending ? -1 : 1;
  });
}

/** The values that each kernel computes, by the kernel's name. @param {Record<string, Value>} values @returns {Map<string, string[]>} */
export function computedBy(values) {
  /** @type {Map<string, string[]>} */
  const found = new Map();
  for (const [name, { kernel, removed, op }] of Object.entries(values)) {
    // The parts of a kernel that has several results lead to the call too, and there are many.
    if (!kernel || removed || op === "getitem") continue;
    const names = found.get(kernel);
    if (names) names.push(name);
    else found.set(kernel, [name]);
  }
  return found;
}
