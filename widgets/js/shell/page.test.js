import assert from "node:assert/strict";
import { test } from "node:test";
import { follow, linkOf, PageModel, withEvents } from "./page.js";

/** @param {Record<string, any>} config @returns {any} */
const held = (config) => ({ config, passes: [{ name: "cat" }, { name: "fuse" }], values: { mm: {} } });
const page = () => new PageModel([held({ cat: true, fuse: true }), held({ cat: false, fuse: true })]);

test("a switch moves to a configuration that the page holds", () => {
  const model = page();
  let drawn = 0;
  model.on("change:payload", () => (drawn += 1));
  model.send({ type: "configure", changes: { cat: false } });
  assert.equal(model.get("payload"), model.payloads[1]);
  assert.equal(model.get("status").error, null);
  assert.equal(drawn, 1);
});

test("a configuration that it lacks is answered beside its switch", () => {
  const model = page();
  assert.equal(model.holds({ fuse: false }), false);
  model.send({ type: "configure", changes: { fuse: false } });
  assert.equal(model.get("payload"), model.payloads[0]);
  assert.deepEqual([model.get("status").error?.panel, model.get("status").error?.at], ["passes", "fuse"]);
});

for (const [type, panel] of [["measure", "timing"], ["pin", "timing"], ["inspect", "kernels"], ["take", "take"], ["what", "take"]]) {
  test(`${type} is answered with one sentence`, () => {
    const model = page();
    model.send(/** @type {any} */ ({ type }));
    assert.equal(model.get("status").error?.panel, panel);
    assert.match(model.get("status").error?.message ?? "", /^A saved page [a-z ]+: run it in a notebook\.$/);
  });
}

test("events come back as numbers", () => {
  const events = new DataView(new ArrayBuffer(8));
  events.setFloat64(0, 1.5, true);
  const text = btoa(String.fromCharCode(...new Uint8Array(events.buffer)));
  const timeline = withEvents({ provenance: "p", programs: [{ label: "a", count: 1, events: text }] });
  assert.equal(timeline?.programs[0].events.getFloat64(0, true), 1.5);
  assert.equal(withEvents(null), null);
});

test("a link leads to what it was taken of", () => {
  const model = page();
  assert.equal(linkOf(model), "");
  model.set("tab", "graph");
  model.set("selected", "mm");
  model.send({ type: "configure", changes: { cat: false } });
  const other = page();
  follow(other, `#${linkOf(model)}`);
  assert.deepEqual([other.get("tab"), other.get("selected"), other.get("payload")], ["graph", "mm", other.payloads[1]]);
});

test("a link to what the page does not have opens what it has", () => {
  const model = page();
  follow(model, "#tab=graph&value=nothing&configuration=9");
  assert.deepEqual([model.get("tab"), model.get("selected"), model.get("payload")], ["graph", "", model.payloads[0]]);
});

test("the board of a page marks what is shown", () => {
  const row = (/** @type {any} */ config) => ({ capture: 0, config, is_shown: false });
  const board = /** @type {any} */ ({ capture: 0, captures: ["c"], rows: [row({ cat: true, fuse: true }), row({ cat: false, fuse: true })] });
  const model = new PageModel(page().payloads, null, board);
  model.send({ type: "configure", changes: { cat: false } });
  assert.deepEqual(model.get("board").rows.map((one) => one.is_shown), [false, true]);
});
