// Python text as tokens, for traces and Triton sources alike. How a token looks is the reader's business. It needs no DOM.

const TOKEN =
  /(#.*)|("""[^]*?"""|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(@[\w.]+)|\b(torch\.ops\.\w+\.\w+(?:\.\w+)?)|([A-Za-z_]\w*)|(\d[\d.]*(?:e[+-]?\d+)?\w*)/g;
const KINDS = /** @type {const} */ (["comment", "string", "decorator", "op", "name", "number"]);
const KEYWORDS = new Set("and as assert break class continue def del elif else False for from if import in is lambda None not or pass raise return True while with".split(" "));

/** @typedef {(typeof KINDS)[number] | "keyword" | ""} TokenKind */

/**
 * The whole of `code` in order; what lies between tokens has the kind "".
 * @param {string} code @returns {{ kind: TokenKind, text: string }[]}
 */
export function tokens(code) {
  /** @type {{ kind: TokenKind, text: string }[]} */
  const found = [];
  let at = 0;
  for (const match of code.matchAll(TOKEN)) {
    const [text, ...groups] = match;
    if (match.index > at) found.push({ kind: "", text: code.slice(at, match.index) });
    const kind = KINDS[groups.findIndex((group) => group !== undefined)];
    found.push({ kind: kind === "name" && KEYWORDS.has(text) ? "keyword" : kind, text });
    at = match.index + text.length;
  }
  if (at < code.length) found.push({ kind: "", text: code.slice(at) });
  return found;
}
