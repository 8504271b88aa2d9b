// Two texts side by side: each line stands beside the one that it became, or beside nothing. It needs no DOM.

/** What follows from the ops around it is said once, where a half is one text. */
const LEFT_OUT = new Set(["signature", "free"]);
/** Lines that passes keep the names of: the others stand above them or between them. */
const NAMED = new Set(["input", "op", "return"]);

/** @typedef {{ before: Line[], after: Line[] }} Sides equally many lines, those of one place beside each other */

/** @param {Half & { before: Line[] }} half @returns {Sides} */
export function sides({ before, lines }) {
  const [old, now] = [before, lines.filter(({ diff }) => diff !== "-")];
  const parts = [true, false].map((isInput) => aligned(...some(old, now, (line) => (line.kind === "input") === isInput && !LEFT_OUT.has(line.kind))));
  return { before: parts.flatMap((part) => part.before), after: parts.flatMap((part) => part.after) };
}

/** @param {Line[]} old @param {Line[]} now @param {(line: Line) => boolean} isWanted @returns {[Line[], Line[]]} */
function some(old, now, isWanted) {
  return [old.filter(isWanted), now.filter(isWanted)];
}

/** @param {Line[]} old @param {Line[]} now @returns {Sides} */
function aligned(old, now) {
  /** @type {Sides} */
  const found = { before: [], after: [] };
  const places = new Map(old.map((line, at) => [keyOf(line), at]));
  let [from, start] = [0, 0];
  now.forEach((line, at) => {
    const was = NAMED.has(line.kind) && line.diff !== "+" ? places.get(keyOf(line)) : undefined;
    if (was === undefined || was < from) return;
    between(old.slice(from, was), now.slice(start, at), found);
    beside(old[was], line, found);
    [from, start] = [was + 1, at + 1];
  });
  between(old.slice(from), now.slice(start), found);
  return found;
}

/** @param {Line} line */
const keyOf = ({ value, kind }) => value || kind;

/** One line before and after. @param {Line} old @param {Line} line @param {Sides} found */
function beside(old, line, { before, after }) {
  const isChanged = line.diff === "~";
  before.push(isChanged ? { ...old, diff: "-", differs: middle(old.code, line.code) } : { ...old, diff: " " });
  after.push(isChanged ? { ...line, differs: middle(line.code, old.code) } : line);
}

/** What stands between two lines that both have: headers at its ends that are the same, and the rest, which came and went. @param {Line[]} old @param {Line[]} now @param {Sides} found */
function between(old, now, { before, after }) {
  const least = Math.min(old.length, now.length);
  let head = 0;
  while (head < least && isSame(old[head], now[head])) head += 1;
  let tail = 0;
  while (tail < least - head && isSame(old[old.length - 1 - tail], now[now.length - 1 - tail])) tail += 1;
  const [gone, made] = [old, now].map((lines) => lines.slice(head, lines.length - tail).filter(({ kind }) => kind !== "blank"));
  before.push(...old.slice(0, head));
  after.push(...now.slice(0, head));
  for (let at = 0; at < Math.max(gone.length, made.length); at += 1) {
    before.push(gone[at] ? { ...gone[at], diff: "-" } : filler(made[at]));
    after.push(made[at] ? { ...made[at], diff: "+" } : filler(gone[at]));
  }
  before.push(...old.slice(old.length - tail));
  after.push(...now.slice(now.length - tail));
}

/** @param {Line} one @param {Line} other */
function isSame(one, other) {
  return !NAMED.has(one.kind) && one.kind === other.kind && one.comment === other.comment;
}

/** Takes the room of the line beside it. @param {Line} line @returns {Line} */
function filler({ kind }) {
  return { code: "", comment: "", value: "", kind, diff: "~", filler: true };
}

/** The words of `code` that `other` has not: from where they part to where they meet again. @param {string} code @param {string} other @returns {[number, number]} */
function middle(code, other) {
  const least = Math.min(code.length, other.length);
  let start = 0;
  while (start < least && code[start] === other[start]) start += 1;
  let end = 0;
  while (end < least - start && code.at(-1 - end) === other.at(-1 - end)) end += 1;
  while (start > 0 && /\w/.test(code[start - 1])) start -= 1;
  while (end > 0 && /\w/.test(code[code.length - end])) end -= 1;
  return [start, code.length - end];
}
