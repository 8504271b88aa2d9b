import assert from "node:assert/strict";
import { test } from "node:test";

import { codeOf, inUnit } from "./widgets.js";

test("a fix is copied as its code, and as all of its words where it has none", () => {
  const finding = /** @type {Finding} */ ({ code: "y = f(x)", fix: "cast nothing: `y = f(x)` does it" });
  assert.equal(codeOf(finding), "y = f(x)");
  assert.equal(codeOf({ ...finding, code: "", fix: "`F.f` sums inside: leave `.float()` out" }), "F.f sums inside: leave .float() out");
});

test("below a nanosecond a time is no figure", () => {
  assert.deepEqual([0.0000024, 0.0024, 0].map((us) => inUnit(us, { us: 1 })), ["<0.001", "0.0024", "0"]);
  assert.deepEqual([0.0000024, 0.0024].map((us) => inUnit(us, { us: 1e-3 })), ["<1", "2.40"]);
  assert.equal(inUnit(0.5, { us: 1000 }), "0.0005");
});
