import assert from "node:assert/strict";
import test from "node:test";

import { changeStarts, fold, traceText } from "./folds.js";

const line = (diff, code = "", kind = "op", comment = "") => ({ code, comment, value: "", kind, diff });
const lines = (marks) => [...marks].map((mark, at) => line(mark === "." ? " " : mark, String(at)));
const shape = (marks) => fold(lines(marks)).map((run) => `${run.folded ? "f" : "s"}${run.lines.length}`);

test("what is far from every change is folded, two lines around one stay", () => {
  assert.deepEqual(shape("..........+.........."), ["f8", "s5", "f8"]);
  assert.deepEqual(shape("+.........~"), ["s3", "f5", "s3"]);
});

test("a run as short as its fold stays, and no line is lost or moved", () => {
  assert.deepEqual(shape("+.......+"), ["s9"]);
  const all = lines("-....................+...");
  assert.deepEqual(fold(all).flatMap((run) => run.lines), all);
});

test("without a change all is one fold, and nothing is nothing", () => {
  assert.deepEqual(shape(".........."), ["f10"]);
  assert.deepEqual(fold([]), []);
});

test("a change begins where its run does, blank lines do not part it", () => {
  assert.deepEqual(changeStarts(lines("..+-~..~")), [2, 7]);
  assert.deepEqual(changeStarts([line("+"), line(" ", "", "blank"), line("-"), line(" "), line("~")]), [0, 4]);
});

test("the text is that of the program as it is, comments behind their lines", () => {
  const half = { lines: [line(" ", "def forward(x):", "signature"), line(" ", "", "group", "# h.0"), line("-", "    y = a(x)"), line("+", "    y = b(x)", "op", "# f32[2]  8 B")], ops: [1, 1], added: 1, removed: 1 };
  const empty = { lines: [], ops: [0, 0], added: 0, removed: 0 };
  assert.equal(traceText({ forward: half, backward: empty }), "def forward(x):\n    # h.0\n    y = b(x)  # f32[2]  8 B\n\n\n");
});
