// Both halves of the trace as code, side by side: diff glyphs against the unoptimised trace, dimmed types, names that select.

import { h, plural, signed } from "./dom.js";

// Lines of one chunk are laid out together; chunks off the screen are not laid out at all.
const CHUNK = 100;
const GLYPHS = { " ": "", "+": "+", "-": "−", "~": "~" };
const TOKEN = /("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|\b(torch\.ops\.\w+\.\w+(?:\.\w+)?)|([A-Za-z_]\w*)|(\d[\w.]*(?:e-?\d+)?)/g;
// One value of an operator that has several: nothing runs for it.
const ITEM = /^\s*\w+ = \w+\[\d+\]$/;
const KEYWORDS = new Set(["def", "return", "del", "None", "True", "False", "import", "from", "as"]);

/** @implements {Panel} */
export class CodePanel {
  /** @param {Act} act */
  constructor(act) {
    this.panes = /** @type {const} */ ({ forward: new CodePane("Forward", act), backward: new CodePane("Backward", act) });
    this.diff = h("input", { type: "checkbox", checked: true, "data-testid": "tf-diff", onchange: () => this.redraw() });
    const toolbar = h("div", { class: "tf-toolbar" }, h("span", { class: "tf-note" }, "Changes against the trace as captured"), h("label", null, this.diff, "show removed lines"));
    this.element = h("div", { class: "tf-code-panel" }, toolbar, h("div", { class: "tf-panes" }, this.panes.forward.element, this.panes.backward.element));
    /** @type {View | null} */
    this.view = null;
  }

  /** @param {View} view */
  draw(view) {
    // Progress of a measurement changes no line.
    if (this.view?.payload === view.payload) return;
    this.view = view;
    this.redraw();
  }

  redraw() {
    if (!this.view) return;
    const { payload } = this.view;
    const kernels = new Set(payload.kernels.map((kernel) => kernel.name));
    this.panes.forward.show(payload.forward, payload.values, kernels, this.diff.checked);
    this.panes.backward.show(payload.backward, payload.values, kernels, this.diff.checked);
    this.mark(this.view);
  }

  /** @param {View} view */
  mark(view) {
    this.view = view;
    const twins = view.payload.values[view.selected]?.twins ?? [];
    this.panes.forward.highlight(view.selected, twins);
    this.panes.backward.highlight(view.selected, twins);
  }
}

class CodePane {
  /**
   * @param {string} title "Forward" or "Backward"
   * @param {Act} act
   */
  constructor(title, act) {
    this.act = act;
    /** Every token of a value. @type {Map<string, HTMLElement[]>} */
    this.tokens = new Map();
    /** The line that defines a value. @type {Map<string, HTMLElement>} */
    this.rows = new Map();
    /** @type {Set<string>} */
    this.kernels = new Set();
    this.count = h("span", { class: "tf-note" });
    this.changes = h("span", { class: "tf-changes" });
    this.body = h("div", { class: "tf-code", tabindex: "0", role: "group", "aria-label": `${title} trace`, "data-testid": `tf-code-${title.toLowerCase()}` });
    this.body.addEventListener("click", (event) => this.onClick(event));
    this.body.addEventListener("keydown", (event) => this.onKey(event));
    /** Whether the list of inputs is unfolded; a long one hides what the reader came for. */
    this.inputsOpen = false;
    this.element = h("section", { class: "tf-pane" }, h("div", { class: "tf-pane-head" }, h("h3", null, title), this.count, this.changes), this.body);
  }

  /**
   * @param {Half} half @param {Record<string, Value>} values @param {Set<string>} kernels names of the Triton kernels
   * @param {boolean} diff whether removed lines are shown
   */
  show(half, values, kernels, diff) {
    this.kernels = kernels;
    this.tokens.clear();
    this.rows.clear();
    const lines = (diff ? half.lines : half.lines.filter((line) => line.diff !== "-")).map((line, at, all) => withModuleType(line, all[at + 1], values));
    const rows = (/** @type {Line[]} */ some) => some.map((line) => this.row(line, values, diff));
    const body = lines.filter((line) => line.kind !== "input" && line.kind !== "signature");
    /** @type {HTMLElement[]} */
    const chunks = [];
    for (let start = 0; start < body.length; start += CHUNK) {
      const chunk = h("div", { class: "tf-chunk" }, rows(body.slice(start, start + CHUNK)));
      chunk.style.containIntrinsicHeight = `auto ${18 * CHUNK}px`;
      chunks.push(chunk);
    }
    const inputs = lines.filter((line) => line.kind === "input");
    this.body.replaceChildren(...rows(lines.filter((line) => line.kind === "signature")), this.inputs(inputs, rows(inputs), diff), ...chunks);
    const [before, after] = half.ops;
    this.count.textContent = before === after ? `${after} ops` : `${before} → ${after} ops`;
    this.changes.replaceChildren(
      ...(half.added ? [h("span", { class: "tf-plus" }, `+${half.added}`)] : []),
      ...(half.removed ? [h("span", { class: "tf-minus" }, `−${half.removed}`)] : []),
    );
    this.changes.title = `lines against the unoptimised trace; ${signed(after - before)} ops`;
  }

  /** @param {Line[]} lines @param {HTMLElement[]} rows @param {boolean} diff */
  inputs(lines, rows, diff) {
    const count = (/** @type {string} */ mark) => lines.filter((line) => line.diff === mark).length;
    const [added, removed] = [count("+"), count("-")];
    return h(
      "details",
      { class: "tf-inputs", open: this.inputsOpen, ontoggle: (/** @type {any} */ e) => (this.inputsOpen = e.target.open) },
      h(
        "summary",
        null,
        plural(lines.length - removed, "input"),
        diff && added > 0 && h("span", { class: "tf-plus" }, ` +${added}`),
        diff && removed > 0 && h("span", { class: "tf-minus" }, ` −${removed}`),
      ),
      h("div", { class: "tf-chunk" }, rows),
    );
  }

  /** @param {Line} line @param {Record<string, Value>} values @param {boolean} diff */
  row(line, values, diff) {
    const mark = diff ? line.diff : " ";
    const classes = `tf-line tf-is-${line.kind}${mark === "-" ? " tf-del" : mark === "+" ? " tf-add" : mark === "~" ? " tf-mod" : ""}`;
    const isOp = line.kind === "op";
    const row = h(
      "div",
      { class: `${classes}${isOp && ITEM.test(line.code) ? " tf-is-item" : ""}`, "data-defines": line.value || null },
      h("span", { class: "tf-glyph", "aria-label": { "+": "added", "-": "removed", "~": "changed" }[mark.trim()] }, GLYPHS[mark]),
      h("code", null, ...this.paint(line.code, values), !isOp && line.comment && h("span", { class: "tf-type" }, line.comment)),
      isOp && line.comment && types(line.comment),
    );
    // A value that was rewritten has two lines: the new one is where it is defined.
    if (line.value && (line.diff !== "-" || !this.rows.has(line.value))) this.rows.set(line.value, row);
    return row;
  }

  /** @param {string} code @param {Record<string, Value>} values */
  paint(code, values) {
    /** @type {(Node | string)[]} */
    const parts = [];
    let at = 0;
    for (const match of code.matchAll(TOKEN)) {
      const [text, string, op, word, number] = match;
      const kind = string ? "string" : op ? "op" : number ? "number" : KEYWORDS.has(text) ? "keyword" : "";
      const isKernel = Boolean(word) && this.kernels.has(text);
      const isValue = Boolean(word) && !isKernel && Object.hasOwn(values, text);
      if (!kind && !isValue && !isKernel) continue;
      parts.push(code.slice(at, match.index));
      parts.push(isValue ? this.token(text) : isKernel ? kernelName(text) : op ? operator(text) : h("span", { class: `tf-${kind}` }, text));
      at = /** @type {number} */ (match.index) + text.length;
    }
    parts.push(code.slice(at));
    return parts;
  }

  /** @param {string} name */
  token(name) {
    const token = h("span", { class: "tf-value", "data-value": name }, name);
    const others = this.tokens.get(name);
    if (others) others.push(token);
    else this.tokens.set(name, [token]);
    return token;
  }

  /** Mark the uses of `name`, its line and its twins'; bring the line into this pane's view. @param {string} name @param {string[]} twins */
  highlight(name, twins) {
    for (const marked of this.body.querySelectorAll(".tf-selected, .tf-current, .tf-twin")) {
      marked.classList.remove("tf-selected", "tf-current", "tf-twin");
    }
    if (!name) return;
    for (const token of this.tokens.get(name) ?? []) token.classList.add("tf-selected");
    this.rows.get(name)?.classList.add("tf-current");
    for (const twin of twins) this.rows.get(twin)?.classList.add("tf-twin");
    const own = this.rows.get(name);
    const twin = twins.map((other) => this.rows.get(other)).find(Boolean);
    // A saved value is a mere input of the backward; its twin there says more.
    const target = own?.classList.contains("tf-is-op") ? own : (twin ?? own ?? this.tokens.get(name)?.[0]);
    if (!target) return;
    target.closest("details")?.setAttribute("open", "");
    this.reveal(target);
    // Chunks that were off the screen get their real height only now.
    requestAnimationFrame(() => this.reveal(target));
  }

  /** Scrolls this pane only: `scrollIntoView` would move the notebook too. @param {HTMLElement} target */
  reveal(target) {
    const box = this.body.getBoundingClientRect();
    const at = target.getBoundingClientRect();
    if (at.top >= box.top && at.bottom <= box.bottom) return;
    this.body.scrollTop += at.top - box.top - box.height / 3;
  }

  /** @param {MouseEvent} event */
  onClick(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    const kernel = /** @type {HTMLElement | null} */ (target.closest("[data-kernel]"));
    if (kernel) return this.act.openKernel(/** @type {string} */ (kernel.dataset.kernel));
    const token = /** @type {HTMLElement | null} */ (target.closest("[data-value]"));
    const line = /** @type {HTMLElement | null} */ (target.closest("[data-defines]"));
    const value = token?.dataset.value ?? line?.dataset.defines;
    if (value) this.act.select(value);
    else target.closest(".tf-is-signature, .tf-is-return, .tf-is-free")?.classList.toggle("tf-unfolded");
  }

  /** Up and down walk the values, Escape clears. @param {KeyboardEvent} event */
  onKey(event) {
    if (event.key === "Escape") return this.act.select("");
    const by = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
    if (!by || this.rows.size === 0) return;
    event.preventDefault();
    event.stopPropagation();
    const names = [...this.rows].filter(([, row]) => !row.closest("details:not([open])")).map(([name]) => name);
    const current = names.findIndex((name) => this.rows.get(name)?.classList.contains("tf-current"));
    const next = current < 0 ? (by > 0 ? 0 : names.length - 1) : Math.min(names.length - 1, Math.max(0, current + by));
    this.act.select(names[next]);
  }
}

/** Type and bytes in a column of their own; of a long type, the end gives way. @param {string} comment "# f32[2, 3]  24 B" */
function types(comment) {
  const [type, ...rest] = comment.replace(/^# /, "").split("  ");
  return h("code", { class: "tf-types", title: comment.slice(2) }, h("span", { class: "tf-type" }, type), h("span", { class: "tf-note" }, `  ${rest.join("  ")}`));
}

/**
 * A header that names a child of an nn.Sequential by its index alone says what the child is: "# 1 (BatchNorm2d)".
 * @param {Line} line @param {Line | undefined} next @param {Record<string, Value>} values @returns {Line}
 */
function withModuleType(line, next, values) {
  if (line.kind !== "group" || !next) return line;
  const { module: path, module_type: type } = values[next.value] ?? { module: "", module_type: "" };
  const isNumbered = /(^|\.)\d+$/.test(path) && line.comment.startsWith(`# ${path}  `);
  return isNumbered ? { ...line, comment: line.comment.replace(path, `${path} (${type})`) } : line;
}

/** The prefix that all operators share is there for copying, and takes no room. @param {string} text "torch.ops.aten.mm.default" */
function operator(text) {
  const prefix = "torch.ops.";
  return h("span", { class: "tf-op", title: text }, h("span", { class: "tf-prefix" }, prefix), text.slice(prefix.length));
}

/** @param {string} name */
function kernelName(name) {
  return h("span", { class: "tf-kernel", "data-kernel": name, title: "show the Triton source" }, name);
}
