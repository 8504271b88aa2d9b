// The menu of what can be taken home: files that the kernel writes, texts that the view has, and the download of either.

import { h, plain } from "../parts/dom.js";
import { traceText } from "../parts/folds.js";
import { NAMELESS, NEEDS_KERNEL } from "../parts/widgets.js";

/** @type {[TakeAway, string][]} */
const FILES = [
  ["html", "Save HTML: this view as one file"],
  ["python", "Export Python: forward, backward, kernels"],
  ["chrome_trace", "Open in Perfetto: Chrome trace"],
  ["model_explorer", "Model Explorer: graph as JSON"],
  ["dot", "Graphviz: DOT"],
  ["svg", "Graphviz: SVG"],
];
const THEN = /** @type {Partial<Record<TakeAway, string>>} */ ({
  chrome_trace: "Open ui.perfetto.dev and choose “Open trace file”: it is read in your browser and not uploaded.",
  model_explorer: "Open it with Model Explorer: model-explorer FILE.",
});
/** How long a remark lies over the tabs. */
const SHOWN_MS = 4000;

let count = 0;

export class TakeAwayMenu {
  /** @param {Act} act */
  constructor(act) {
    this.act = act;
    /** @type {Payload | null} */
    this.payload = null;
    /** The file that was asked for last. @type {TakeAway | ""} */
    this.asked = "";
    const id = `tf-take-${(count += 1)}`;
    this.button = h("button", { class: "tf-button", "aria-haspopup": "menu", "aria-expanded": "false", "aria-controls": id, onclick: () => (this.menu.hidden ? this.open(0) : this.close()), "data-testid": "tf-take" }, "Take away ▾");
    this.files = FILES.map(([what, label]) => item(`tf-take-${what}`, label, () => this.take(what)));
    this.config = item("tf-take-config", "Copy configuration as code", () => this.copy(this.payload?.call ?? "", "The configuration"));
    this.usage = item("tf-take-usage", "Copy code that runs it: compile, and a step", () => this.copy(this.payload?.usage ?? "", "The code"));
    const texts = [this.usage, this.config, item("tf-take-trace", "Copy trace as text", () => this.copy(this.payload ? traceText(this.payload) : "", "The trace"))];
    this.items = [...this.files, ...texts];
    this.why = h("p", { class: "tf-note", role: "presentation" });
    this.menu = h("div", { class: "tf-menu", role: "menu", id, hidden: true, "aria-label": "Take away" }, this.why, this.files, h("hr", { role: "separator" }), texts);
    this.element = h("div", { class: "tf-take" }, this.button, this.menu);
    this.element.addEventListener("keydown", (event) => this.onKey(event));
    this.element.addEventListener("focusout", (event) => {
      if (!this.element.contains(/** @type {Node | null} */ (event.relatedTarget))) this.menu.hidden || this.close(false);
    });
    /** What came of it. */
    this.notice = h("div", { class: "tf-take-notice", role: "status", hidden: true, "data-testid": "tf-take-notice" });
    /** What keeps it on show. */
    this.shown = new AbortController();
    /** @type {Status["error"]} */
    this.shownError = null;
  }

  /** @param {View} view */
  draw({ payload, status, live }) {
    this.payload = payload;
    this.button.textContent = status.busy === "take" ? "Writing…" : "Take away ▾";
    const reason = live ? (status.busy ? "the kernel is busy" : "") : NEEDS_KERNEL;
    for (const file of this.files) disable(file, reason);
    this.why.textContent = reason;
    this.why.hidden = reason === "";
    const nameless = payload.call ? "" : NAMELESS;
    disable(this.config, nameless);
    disable(this.usage, nameless || payload.blocked || "");
    const error = status.error?.panel === "take" ? status.error : null;
    if (error && error !== this.shownError) this.say(error.message, true);
    this.shownError = error;
  }

  /** @param {TakeAway} what */
  take(what) {
    this.close();
    this.asked = what;
    this.hide();
    this.act.ask("take", { type: "take", what });
  }

  /** A file came. @param {{ name: string, mime: string }} file @param {DataView} bytes */
  received({ name, mime }, bytes) {
    download(name, new Blob([/** @type {any} */ (bytes)], { type: mime }));
    const next = this.asked && THEN[this.asked]?.replace("FILE", name);
    this.say(`${name} was downloaded.${next ? ` ${next}` : ""}`);
    this.asked = "";
  }

  /** @param {string} text @param {string} what */
  async copy(text, what) {
    this.close();
    try {
      await navigator.clipboard.writeText(text);
      this.say(`${what} is on the clipboard.`);
    } catch {
      // A page without clipboard permission, such as file:// in some browsers.
      this.say("This page may not use the clipboard: select the text and press Ctrl+C.", false, text);
    }
  }

  /** @param {string} text @param {boolean} [isError] @param {string} [toCopy] */
  say(text, isError = false, toCopy = "") {
    this.hide();
    const { signal } = (this.shown = new AbortController());
    const close = h("button", { class: "tf-chip tf-close", "aria-label": "dismiss", onclick: () => this.hide() }, "×");
    this.notice.replaceChildren(h("span", isError ? { class: "tf-error", role: "alert", "data-testid": "tf-error-take" } : null, text), close);
    if (toCopy) this.notice.append(h("textarea", { readonly: true, rows: "6", "aria-label": "text to copy", "data-testid": "tf-take-text", value: toCopy }));
    this.notice.hidden = false;
    // It lies over the tabs: Escape and a press elsewhere take it away; a remark that is read at once goes by itself.
    const drop = (/** @type {any} */ event) => (event.key ? event.key === "Escape" : !event.composedPath().includes(this.notice)) && this.hide();
    for (const type of ["keydown", "pointerdown"]) document.addEventListener(type, drop, { capture: true, signal });
    if (!isError && !toCopy) setTimeout(() => signal.aborted || this.hide(), SHOWN_MS);
  }

  hide() {
    this.notice.hidden = true;
    this.shown.abort();
  }

  // --- the menu's keys: ↑ ↓ walk, Home and End go to the ends, Escape closes -------------------------------------------

  /** @param {number} at */
  open(at) {
    this.menu.hidden = false;
    this.button.setAttribute("aria-expanded", "true");
    this.items.at(at)?.focus();
  }

  close(keepsFocus = true) {
    if (keepsFocus) this.button.focus();
    this.menu.hidden = true;
    this.button.setAttribute("aria-expanded", "false");
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    const at = this.items.findIndex((one) => one === document.activeElement);
    const to = { ArrowDown: (at + 1) % this.items.length, ArrowUp: at - (at < 0 ? 0 : 1), Home: 0, End: -1 }[event.key];
    if (event.key === "Escape" && !this.menu.hidden) this.close();
    else if (to !== undefined) this.open(to);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

/** Items that cannot be used can still be reached, and say why. @param {string} id @param {string} label @param {() => void} act */
function item(id, label, act) {
  const [first, rest] = label.split(": ");
  const button = h("button", { role: "menuitem", tabindex: "-1", "data-testid": id }, first, rest && h("span", { class: "tf-note" }, rest));
  button.onclick = () => button.getAttribute("aria-disabled") === "true" || act();
  return button;
}

/** @param {HTMLButtonElement} button @param {string} reason "" where it can be used */
function disable(button, reason) {
  button.setAttribute("aria-disabled", String(reason !== ""));
  button.title = plain(reason);
}

/** @param {string} name @param {Blob} content */
function download(name, content) {
  const url = URL.createObjectURL(content);
  const link = h("a", { href: url, download: name, hidden: true });
  // Firefox follows only a link that is in the document.
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
