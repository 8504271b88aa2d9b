// The lines of a trace that stand, those that are folded away between changes, and where each change begins. It needs no DOM.

/** Lines shown on either side of a change. */
const CONTEXT = 2;
// A fold takes a line itself.
const SHORTEST = 4;

/** @typedef {{ lines: Line[], folded: boolean }} Run */

/**
 * `lines` in runs that alternate between shown and folded; a run is folded if no change is near it.
 * @param {Line[]} lines @returns {Run[]}
 */
export function fold(lines) {
  const isNear = new Array(lines.length).fill(false);
  lines.forEach(({ diff }, at) => {
    if (diff !== " ") isNear.fill(true, Math.max(0, at - CONTEXT), at + CONTEXT + 1);
  });
  /** @type {Run[]} */
  const runs = [];
  for (let start = 0, end = 0; start < lines.length; start = end) {
    while (end < lines.length && isNear[end] === isNear[start]) end += 1;
    const run = { lines: lines.slice(start, end), folded: !isNear[start] && end - start >= SHORTEST };
    const last = runs.at(-1);
    if (last && !last.folded && !run.folded) last.lines.push(...run.lines);
    else runs.push(run);
  }
  return runs;
}

/**
 * Where each run of changed lines begins. A blank line between two changed ones does not part them.
 * @param {Line[]} lines @returns {number[]}
 */
export function changeStarts(lines) {
  /** @type {number[]} */
  const starts = [];
  let inside = false;
  lines.forEach(({ diff, kind }, at) => {
    if (kind === "blank") return;
    const isChanged = diff !== " ";
    if (isChanged && !inside) starts.push(at);
    inside = isChanged;
  });
  return starts;
}

/** Both halves as they are with the passes, as text that can be pasted. @param {Payload} payload */
export function traceText({ forward, backward }) {
  return [forward, backward].map(({ lines }) => lines.filter((line) => line.diff !== "-").map(textOf).join("\n")).join("\n\n\n");
}

/** @param {Line} line */
function textOf({ code, comment, kind }) {
  if (kind === "group") return `    ${comment}`;
  return comment ? `${code}  ${comment}`.trimEnd() : code;
}
