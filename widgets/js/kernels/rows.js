// The kernels in the order that a reader asks for. It needs no DOM.

/** @typedef {"name" | "calls" | "bytes" | "time"} KernelKey */

/** Bytes that one launch moves. @param {KernelRecord} kernel */
export function moved(kernel) {
  return kernel.nbytes_read + kernel.nbytes_written;
}

/** Microseconds of all launches of a step, or null. @param {KernelRecord} kernel */
export function stepTime({ time_us: us, calls }) {
  return us === null ? null : us * calls;
}

/** @type {Record<KernelKey, (kernel: KernelRecord) => number | string | null>} */
const KEYS = { name: (kernel) => kernel.name, calls: (kernel) => kernel.calls, bytes: (kernel) => moved(kernel) * kernel.calls, time: stepTime };

/**
 * A sorted copy: the most first or, if `ascending`, the least; what has no figure last, equal ones in their order.
 * @param {KernelRecord[]} kernels @param {KernelKey} key @param {boolean} ascending
 */
export function sorted(kernels, key, ascending) {
  const of = KEYS[key];
  return [...kernels].sort((one, other) => {
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
