// The pipeline as a row of steps: all passes together, or one of them, whose own before and after is shown.

import { h } from "../parts/dom.js";
import { NEEDS_KERNEL } from "../parts/widgets.js";

export const WHOLE = "";

export class Steps {
  /** @param {(pass: string) => void} choose called with a pass's name, or `WHOLE` */
  constructor(choose) {
    this.choose = choose;
    /** By the pass's name, in the order of the pipeline. @type {Map<string, HTMLButtonElement>} */
    this.buttons = new Map();
    this.element = h("div", { class: "tf-pipeline", role: "group", "aria-label": "Pipeline", title: "next step: .  previous step: ," });
    this.shown = WHOLE;
  }

  /** @param {PassRecord[]} passes @param {string} shown @param {boolean} live */
  draw(passes, shown, live) {
    const names = [WHOLE, ...passes.map(({ name }) => name)];
    if (names.join() !== [...this.buttons.keys()].join()) {
      this.buttons = new Map(names.map((name) => [name, this.button(name)]));
      this.element.replaceChildren(...this.buttons.values());
    }
    this.shown = shown;
    for (const one of passes) {
      const button = /** @type {HTMLButtonElement} */ (this.buttons.get(one.name));
      button.disabled = !live || !one.enabled || one.error !== null;
      button.classList.toggle("tf-did-change", one.enabled && one.changed);
      const what = one.changed && one.ops ? `${one.ops[0]} → ${one.ops[1]} ops` : "changed nothing";
      button.title = !live ? NEEDS_KERNEL : one.error !== null ? "failed, and left out" : one.enabled ? what : one.state;
    }
    for (const [name, button] of this.buttons) button.setAttribute("aria-pressed", String(name === shown));
  }

  /** What can be stepped to, in order. */
  get open() {
    return [...this.buttons].filter(([name, button]) => name === WHOLE || !button.disabled).map(([name]) => name);
  }

  /** @param {string} name */
  button(name) {
    const title = name === WHOLE ? "what all passes together changed" : null;
    return h("button", { class: "tf-stepping", title, "data-testid": `tf-step-${name || "all"}`, onclick: () => this.choose(name) }, name || "all passes");
  }

  /** @param {1 | -1} by */
  walk(by) {
    const to = this.open[this.open.indexOf(this.shown) + by];
    if (to !== undefined) this.choose(to);
  }
}
