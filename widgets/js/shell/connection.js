// The connection to the kernel, and what is said where it is lost. What the view knew stays on show.

import { h } from "../parts/dom.js";

export class Connection {
  /** @param {Model} model */
  constructor(model) {
    this.model = model;
    /** Where the loss is told. @type {HTMLElement} */
    this.element = h("span");
    /** @param {unknown} _ @param {string} status */
    const told = (_, status) => /dead|term/.test(status) && this.lose("it was shut down");
    /** JupyterLab's, which is the only one that tells. @type {any} */
    const changed = model.widget_manager?.context?.sessionContext?.statusChanged;
    changed?.connect(told);
    this.destroy = () => changed?.disconnect(told);
  }

  /** Whether it was sent. @param {Message} message */
  send(message) {
    try {
      this.model.send(message);
    } catch (error) {
      this.lose(String(error));
      return false;
    }
    return true;
  }

  /** ipywidgets says that the connection was lost or made again, and to us not which of the two: a message shows it. */
  check() {
    this.send({ type: "hello" });
  }

  /** @param {string} why what sending raised: the kernel has ended, or was started anew */
  lose(why) {
    const text = `Run the cell again: this view lost its kernel, and shows what it knew (${why}).`;
    this.element.replaceChildren(h("span", { class: "tf-blocked", title: text, role: "status", "data-testid": "tf-closed" }, text));
    this.model.set("live", false);
  }

  /** A kernel that has come back says so itself. */
  draw() {
    if (this.model.get("live")) this.element.replaceChildren();
  }
}

/** The rule that hides the still form of a view, and in JupyterLab the output that it is: see widgets/view/keeping.py. @param {string} key */
export function hidden(key) {
  return `.jp-OutputArea-child:has(.tf-still-${key}), .tf-still-${key} { display: none; }`;
}
