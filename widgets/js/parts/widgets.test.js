import assert from "node:assert/strict";
import { test } from "node:test";

import { codeOf } from "./widgets.js";

test("a fix is copied as its code, and as all of its words where it has none", () => {
  const finding = /** @type {Finding} */ ({ code: "y = f(x)", fix: "cast nothing: `y = f(x)` does it" });
  assert.equal(codeOf(finding), "y = f(x)");
  assert.equal(codeOf({ ...finding, code: "", fix: "`F.f` sums inside: leave `.float()` out" }), "F.f sums inside: leave .float() out");
});
