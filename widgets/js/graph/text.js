// The words of the graph about a node: its lines, the key of its colour, its tooltip. It needs no DOM.

import { formatBytes, formatTime, plural } from "../parts/dom.js";
import { lastPart } from "./modules.js";

/** @typedef {import("./layout.js").Node} Node @typedef {import("./layout.js").Box} Box @typedef {import("./modules.js").Op} Op */

/** What an op runs, as a short name: "addmm", "div_mul_sum". @param {string} key an operator or a Triton kernel */
export function shortOp(key) {
  return key.startsWith("aten.") ? key.split(".")[1] : key.replace(/^fused_/, "").replace(/_[0-9a-f]{6}$/, "");
}

/** What colours an op: its Triton kernel, or the operator, which is a kernel of ATen's. @param {Op} op */
export const keyOf = ({ value }) => value.kernel || value.op;

/** µs, or null where none of the ops has a time. @param {Op[]} ops */
export function timeOf(ops) {
  let sum = 0;
  let isKnown = false;
  for (const { value } of ops) {
    const time = value.time_us[value.removed ? 0 : 1];
    isKnown ||= time !== null;
    sum += time ?? 0;
  }
  return isKnown ? sum : null;
}

/** Names of what an op with several results has. @param {Op} op */
export function names({ name, value, items }) {
  return value.type.startsWith("(") && items.length > 0 ? items : [name];
}

/** "h.0", "h.0 … h.11 ×12". @param {Box} box */
export function boxName({ module, members }) {
  return members.length > 1 ? `${module.path} ×${members.length}` : module.path;
}

/** What a box is of: its type, which layers are folded, and whether they are all alike after the passes. @param {Box} box */
export function boxNote({ module, members, forms }) {
  if (members.length === 1) return module.type;
  const alike = forms > 1 ? `, optimised in ${forms} ways` : "";
  return `${module.type}  ${members[0].path} … ${lastPart(members[members.length - 1].path)}${alike}`;
}

/** The three lines in a node's box. @param {Node} node @returns {[string, string, string]} */
export function lines(node) {
  const time = timeOf(node.ops);
  if (node.module) {
    const { members } = node.module;
    const each = node.ops.length / members.length;
    const count = plural(Number.isInteger(each) ? each : node.ops.length, "op");
    const what = members.length > 1 ? `${count}${Number.isInteger(each) ? " each" : ""}` : count;
    return [boxName(node.module), `${node.module.module.type}${node.phase === "update" ? "" : ` ${node.phase}`}`, [time === null ? "" : formatTime(time), what].filter(Boolean).join(" · ")];
  }
  const [op] = node.ops;
  return [shortOp(keyOf(op)), names(op).join(", "), [time === null ? "no time" : formatTime(time), formatBytes(op.value.nbytes)].join(" · ")];
}

/** @param {Node} node @param {Payload} payload @returns {string[]} */
export function tooltip(node, payload) {
  const time = timeOf(node.ops);
  const total = time === null ? "no time is known" : `${formatTime(time)}, ${payload.times.after}`;
  if (node.module) {
    const [name, , figures] = lines(node);
    return [name, boxNote(node.module), `${node.phase}: ${figures.split(" · ").at(-1)}`, total, "Enter or double click opens it"];
  }
  const [op] = node.ops;
  const { value } = op;
  return [names(op).join(", "), value.kernel || value.op, `${value.type}  ${formatBytes(value.nbytes)}`, total, value.module && `${value.module}: ${value.module_type}`, value.source].filter(Boolean);
}

/** For a screen reader. @param {Node} node @param {Payload} payload */
export function spoken(node, payload) {
  const parts = tooltip(node, payload).join(", ");
  const around = `${plural(node.inputs.size, "input")}, ${plural(node.readers.size, "reader")}, ${node.saved.size ? plural(node.saved.size, "saved-tensor link") : "no saved-tensor link"}`;
  return `${node.phase}, ${parts}, ${around}`;
}

/** Time by what runs, the most first. @param {Iterable<Op>} ops @returns {{ key: string, us: number, count: number }[]} */
export function shares(ops) {
  /** @type {Map<string, { key: string, us: number, count: number }>} */
  const found = new Map();
  for (const op of ops) {
    const key = keyOf(op);
    const one = found.get(key) ?? { key, us: 0, count: 0 };
    one.us += timeOf([op]) ?? 0;
    one.count += 1;
    found.set(key, one);
  }
  return [...found.values()].sort((a, b) => b.us - a.us || b.count - a.count);
}

/** "A" … "Z", "A1" …: tells colours apart without the colour. @param {number} index */
export function letter(index) {
  const round = Math.floor(index / 26);
  return String.fromCharCode(65 + (index % 26)) + (round || "");
}
