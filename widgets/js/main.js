// The explorer: one model, five panels. Python computes; this draws, and sends back what was switched.

import { CodePane } from "./code.js";
import { details } from "./details.js";
import { h } from "./dom.js";
import { passes } from "./passes.js";
import css from "./style.css";
import { kernelTable, notesTable, tabLabels, timingTable } from "./tables.js";
import { verdict } from "./verdict.js";

export { mountPage } from "./page.js";

class Explorer {
  /** @param {Model} model @param {HTMLElement} host */
  constructor(model, host) {
    this.model = model;
    this.diff = true;
    this.tab = "timing";
    /** The status that the panels were drawn with. */
    this.shown = model.get("status");
    /** @type {Open} */
    this.open = { passes: new Set(), kernels: new Set(), typed: {} };
    this.act = {
      configure: (/** @type {Partial<Config>} */ changes) => this.ask("passes", { type: "configure", changes }),
      select: (/** @type {string} */ value) => this.select(value),
      openKernel: (/** @type {string} */ name) => this.openKernel(name),
      live: model.get("live"),
      holds: (/** @type {Partial<Config>} */ changes) => model.holds?.(changes) ?? true,
    };
    this.forward = new CodePane("Forward", this.act);
    this.backward = new CodePane("Backward", this.act);
    this.slots = {
      verdict: h("div"),
      passes: h("div", { class: "tf-side" }),
      details: h("div"),
      tables: h("section", { class: "tf-tables" }),
    };
    this.diffSwitch = h("input", { type: "checkbox", checked: true, "data-testid": "tf-diff", onchange: () => this.toggleDiff() });
    const toolbar = h("div", { class: "tf-toolbar" }, h("span", { class: "tf-note" }, "Changes against the trace as captured"), h("label", null, this.diffSwitch, "show removed lines"));
    const code = h("div", { class: "tf-main" }, toolbar, h("div", { class: "tf-panes" }, this.forward.element, this.backward.element), this.slots.details);
    this.root = h(
      "div",
      { class: "tf", "data-testid": "tf-root" },
      h("style", null, css),
      h("div", { class: "tf-frame" }, this.slots.verdict, h("div", { class: "tf-columns" }, this.slots.passes, code), this.slots.tables),
    );
    // JupyterLab's shortcuts would take single letters and arrows away from the fields in here.
    this.root.addEventListener("keydown", (event) => event.stopPropagation());
    host.append(this.root);
  }

  get payload() {
    return this.model.get("payload");
  }

  get status() {
    return this.model.get("status");
  }

  /** Send a message, and show at once that `panel` waits: the kernel may be running a cell. @param {"passes" | "timing"} panel @param {Message} message */
  ask(panel, message) {
    this.root.dataset.busy = panel;
    this.model.send(message);
  }

  drawAll() {
    const { payload } = this;
    const kernels = new Set(payload.kernels.map((kernel) => kernel.name));
    this.forward.show(payload.forward, payload.values, kernels, this.diff);
    this.backward.show(payload.backward, payload.values, kernels, this.diff);
    this.drawVerdict();
    this.drawPanels();
    this.drawSelection();
    this.root.dataset.ready = "1";
  }

  /** Progress touches the verdict bar only, so that nobody's typing in the other panels is lost. */
  drawStatus() {
    const { busy, error } = this.status;
    const isProgress = busy === this.shown.busy && error === this.shown.error;
    this.drawVerdict();
    if (!isProgress) this.drawPanels();
  }

  drawVerdict() {
    this.root.dataset.busy = this.status.busy;
    const measure = () => this.ask("timing", { type: "measure" });
    this.swap(this.slots.verdict, verdict(this.payload, this.status, this.model.get("live"), measure));
  }

  drawPanels() {
    this.shown = this.status;
    this.swap(this.slots.passes, passes(this.payload, this.status, this.open, this.act));
    this.drawTables();
  }

  drawTables() {
    const { payload } = this;
    if (this.status.error?.panel === "timing") this.tab = "timing";
    const panel = { timing: () => timingTable(payload, this.status, this.act.live), kernels: () => kernelTable(payload, this.open.kernels), notes: () => notesTable(payload) };
    const tabs = tabLabels(payload).map(([id, label]) =>
      h("button", { role: "tab", "aria-selected": String(id === this.tab), onclick: () => this.openTab(id), "data-testid": `tf-tab-${id}` }, label),
    );
    const body = h("div", { class: "tf-tab-body", role: "tabpanel" }, panel[/** @type {"timing"} */ (this.tab)]());
    this.swap(this.slots.tables, h("div", { class: "tf-tabs", role: "tablist" }, tabs), body);
  }

  drawSelection() {
    const name = this.model.get("selected");
    const twins = this.payload.values[name]?.twins ?? [];
    this.forward.highlight(name, twins);
    this.backward.highlight(name, twins);
    this.swap(this.slots.details, details(name, this.payload, this.act));
  }

  /** Replace a panel and keep the keyboard where it was. @param {HTMLElement} slot @param {...HTMLElement} content */
  swap(slot, ...content) {
    const focused = slot.contains(document.activeElement) ? /** @type {HTMLElement} */ (document.activeElement).dataset.testid : undefined;
    slot.replaceChildren(...content);
    if (focused) /** @type {HTMLElement | null} */ (slot.querySelector(`[data-testid="${CSS.escape(focused)}"]`))?.focus({ preventScroll: true });
  }

  /** @param {string} id */
  openTab(id) {
    this.tab = id;
    this.drawTables();
  }

  /** Unfold a kernel's source in its table and go there. @param {string} name */
  openKernel(name) {
    this.open.kernels.add(name);
    this.openTab("kernels");
    const button = /** @type {HTMLElement | null} */ (this.slots.tables.querySelector(`[data-testid="${CSS.escape(`tf-kernel-${name}`)}"]`));
    button?.scrollIntoView({ block: "nearest" });
    button?.focus({ preventScroll: true });
  }

  toggleDiff() {
    this.diff = this.diffSwitch.checked;
    this.drawAll();
  }

  /** @param {string} value */
  select(value) {
    this.model.set("selected", value);
    this.model.save_changes();
  }
}

/** @param {{ model: Model, el: HTMLElement }} context @returns {() => void} the clean-up */
function render({ model, el }) {
  const explorer = new Explorer(model, el);
  const listeners = /** @type {[string, () => void][]} */ ([
    ["change:payload", () => explorer.drawAll()],
    ["change:status", () => explorer.drawStatus()],
    ["change:selected", () => explorer.drawSelection()],
  ]);
  for (const [event, listener] of listeners) model.on(event, listener);
  explorer.drawAll();
  return () => {
    for (const [event, listener] of listeners) model.off(event, listener);
  };
}

export default { render };
