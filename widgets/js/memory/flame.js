// What is alive at the peak as a flame: purposes, of what is saved its modules, of each of these why. It needs no DOM.

/** @typedef {[before: number, after: number]} Pair */
/** @typedef {{ name: string, path: string, kind: "peak" | "purpose" | "module" | "reason", bytes: Pair, count: number, value: string, inside: Block[] }} Block `count` storages after the passes, the largest of which is `value` */
/** @typedef {{ block: Block, level: number, from: number, to: number }} Bar `from` and `to` in shares of the larger peak */

/** @param {AtPeak} atPeak @returns {Block} */
export function tree({ purposes, saved }) {
  const root = block("peak", "peak", "");
  for (const [name, ...bytes] of purposes) root.inside.push({ ...block(name, "purpose", name), bytes });
  const home = root.inside.find(({ name }) => name === "saved");
  for (const row of saved) if (home) put(home, row);
  const total = (/** @type {0 | 1} */ side) => root.inside.reduce((sum, { bytes }) => sum + bytes[side], 0);
  return sorted(joined({ ...root, bytes: [total(0), total(1)] }));
}

/** @param {string} name @param {Block["kind"]} kind @param {string} path @returns {Block} */
const block = (name, kind, path) => ({ name, path, kind, bytes: [0, 0], count: 0, value: "", inside: [] });

/** Add a row to the modules on its path, and the reason to the last one. @param {Block} home @param {AtPeak["saved"][number]} row */
function put(home, [module, reason, before, after, count, value]) {
  const steps = /** @type {[string, Block["kind"]][]} */ ([...module.split(".").map((name) => [name, "module"]), [reason, "reason"]]);
  let at = home;
  let path = "";
  for (const [name, kind] of steps) {
    path = kind === "reason" || path === "" ? (kind === "reason" ? path : name) : `${path}.${name}`;
    let next = at.inside.find((one) => one.name === name && one.kind === kind);
    if (!next) at.inside.push((next = { ...block(name, kind, path), value }));
    next.bytes = [next.bytes[0] + before, next.bytes[1] + after];
    next.count += count;
    at = next;
  }
}

/** Modules that hold nothing but another one are one block with it: "h.*". @param {Block} one @returns {Block} */
function joined(one) {
  const inside = one.inside.map(joined);
  const [only] = inside;
  if (one.kind === "module" && inside.length === 1 && only.kind === "module") return { ...only, name: `${one.name}.${only.name}` };
  return { ...one, inside };
}

/** The largest first, on both sides in the same order. @param {Block} one @returns {Block} */
function sorted(one) {
  const inside = one.inside.map(sorted).sort((a, b) => Math.max(...b.bytes) - Math.max(...a.bytes) || (a.name < b.name ? -1 : 1));
  return { ...one, inside };
}

/** The bars of one side, each beside the one before it. @param {Block} root @param {0 | 1} side @returns {Bar[]} */
export function bars(root, side) {
  const most = Math.max(...root.bytes) || 1;
  /** @type {Bar[]} */
  const found = [];
  const visit = (/** @type {Block} */ one, /** @type {number} */ level, /** @type {number} */ from) => {
    if (one.bytes[side] === 0) return;
    found.push({ block: one, level, from: from / most, to: (from + one.bytes[side]) / most });
    let start = from;
    for (const next of one.inside) {
      visit(next, level + 1, start);
      start += next.bytes[side];
    }
  };
  visit(root, 0, 0);
  return found;
}
