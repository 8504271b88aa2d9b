// One line of a trace: its glyph, its code in colours with names to select, and a column with its type and bytes.

import { h } from "../parts/dom.js";
import { tokens } from "../parts/highlight.js";

const GLYPHS = { " ": "", "+": "+", "-": "−", "~": "~" };
const CHANGED = { " ": null, "+": "added", "-": "removed", "~": "changed" };
const CLASSES = { " ": "", "+": " tf-add", "-": " tf-del", "~": " tf-mod" };
// One value of an operator that has several: nothing runs for it.
const ITEM = /^\s*\w+ = \w+\[\d+\]$/;
const PREFIX = "torch.ops.";
const OVERLOAD = ".default";

/**
 * @param {Line} line @param {Record<string, Value>} values
 * @param {Set<string>} kernels names of the Triton kernels
 * @param {(name: string, token: HTMLElement) => void} found called with each name of a value
 */
export function codeLine(line, values, kernels, found) {
  if (line.filler) return h("div", { class: `tf-line tf-is-${line.kind} tf-is-filler` });
  const mark = line.diff;
  const isOp = line.kind === "op";
  return h(
    "div",
    { class: `tf-line tf-is-${line.kind}${CLASSES[mark]}${isOp && ITEM.test(line.code) ? " tf-is-item" : ""}`, "data-defines": line.value || null, title: isOp ? line.comment.slice(2) : null },
    h("span", { class: "tf-glyph", role: CHANGED[mark] && "img", "aria-label": CHANGED[mark] }, GLYPHS[mark]),
    h("code", null, ...paint(line, values, kernels, found), !isOp && line.comment && h("span", { class: "tf-type" }, line.comment)),
    isOp && line.comment && types(line.comment),
  );
}

/** @param {Line} line @param {Record<string, Value>} values @param {Set<string>} kernels @param {(name: string, token: HTMLElement) => void} found */
function paint({ code, differs }, values, kernels, found) {
  let at = 0;
  return tokens(code).map((token) => {
    const [start, end] = [at, (at += token.text.length)];
    const shown = painted(token, values, kernels, found);
    return differs && start < differs[1] && end > differs[0] ? h("span", { class: "tf-differs" }, shown) : shown;
  });
}

/** @param {ReturnType<typeof tokens>[number]} token @param {Record<string, Value>} values @param {Set<string>} kernels @param {(name: string, token: HTMLElement) => void} found */
function painted({ kind, text }, values, kernels, found) {
  if (kind === "op") return operator(text);
  if (kind !== "name") return kind ? h("span", { class: `tf-${kind}` }, text) : text;
  if (kernels.has(text)) return h("span", { class: "tf-kernel", "data-kernel": text, title: "show the Triton source" }, text);
  if (!Object.hasOwn(values, text)) return text;
  const token = h("span", { class: "tf-value", "data-value": text }, text);
  found(text, token);
  return token;
}

/** What all operators and most overloads share is there for copying, and takes no room. @param {string} text "torch.ops.aten.mm.default" */
function operator(text) {
  const end = text.endsWith(OVERLOAD) ? -OVERLOAD.length : undefined;
  const hidden = (/** @type {string} */ part) => h("span", { class: "tf-prefix" }, part);
  return h("span", { class: "tf-op", title: text }, hidden(PREFIX), text.slice(PREFIX.length, end), end && hidden(OVERLOAD));
}

/** Of a long type, the end gives way. @param {string} comment "# f32[2, 3]  24 B" */
function types(comment) {
  const [type, ...rest] = comment.replace(/^# /, "").split("  ");
  return h("code", { class: "tf-types" }, h("span", { class: "tf-type" }, type), h("span", { class: "tf-note" }, `  ${rest.join("  ")}`));
}

/**
 * A header that names a child of an nn.Sequential by its index alone says what the child is: "# 1 (BatchNorm2d)".
 * @param {Line} line @param {Line | undefined} next @param {Record<string, Value>} values @returns {Line}
 */
export function withModuleType(line, next, values) {
  if (line.kind !== "group" || !next) return line;
  const { module: path, module_type: type } = values[next.value] ?? { module: "", module_type: "" };
  const isNumbered = /(^|\.)\d+$/.test(path) && line.comment.startsWith(`# ${path}  `);
  return isNumbered ? { ...line, comment: line.comment.replace(path, `${path} (${type})`) } : line;
}
