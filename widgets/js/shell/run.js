// The page about a run of the user's own, without a trace: its timeline, and what keeps its GPU idle.

import { h } from "../parts/dom.js";
import { FindingsPanel } from "../tables/findings.js";
import { TimelinePanel } from "../timeline/panel.js";

const NONE = { ops: [], live: [], again: [], peak: 0, at: "", alive: [] };

/** Show a run, as widgets/timeline_page.py writes it, in `host`. @param {any} run @param {Timeline} timeline @param {HTMLElement} host @param {string} styles */
export function mountRun({ text, ...run }, timeline, host, styles) {
  const payload = { ...run, times: null, memory: { before: NONE, after: NONE, reasons: [], modules: [] }, summary: {}, kernels: [], config: {} };
  /** @type {any} */
  const view = { payload, timeline, status: {}, selected: "", pass: "", matches: null, step: null, live: false };
  const act = /** @type {any} */ ({
    live: false,
    holds: () => false,
    select(/** @type {string} */ value) {
      view.selected = value;
      panel.mark(view);
    },
  });
  const panel = new TimelinePanel(act);
  panel.dom.gaps.open = true;
  const found = new FindingsPanel(act);
  const said = h("details", { class: "tf-timeline-more", "data-testid": "tf-run-text" }, h("summary", null, "As text, with what became of every record"), h("pre", { tabindex: "0" }, text));
  host.append(h("div", { class: "tf tf-run", "data-testid": "tf-root", "data-ready": "1" }, h("style", null, styles), panel.element, found.element, said));
  panel.draw(view);
  panel.mark(view);
  found.draw(view);
}
