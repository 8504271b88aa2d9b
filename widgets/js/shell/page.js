// The model of a saved page, which has no kernel: it answers from configurations that were computed when it was written.

import { bytesOf, decode } from "../parts/unpack.js";
import { mountRun } from "./run.js";

/** @type {Status} */
const IDLE = { busy: "", progress: null, text: "", error: null };

/** @type {BoardState} */
const NO_BOARD = { capture: 0, captures: [""], device: "", gathers: false, rows: [], said: "", comparison: null };

/** Where the answer to a message is shown, and what the page lacks for it. @type {Partial<Record<Message["type"], [panel: Exclude<Status["busy"], "">, what: string]>>} */
const NEEDS_KERNEL = {
  measure: ["timing", "measures nothing"],
  ablate: ["timing", "measures nothing"],
  try: ["findings", "measures nothing"],
  cancel: ["timing", "measures nothing"],
  pin: ["timing", "keeps the baseline that it was saved with"],
  unpin: ["timing", "keeps the baseline that it was saved with"],
  inspect: ["kernels", "compiles nothing"],
  clock: ["passes", "shows the times that it was saved with"],
  take: ["take", "writes no other files"],
  sweep: ["board", "tries nothing new"],
  compare: ["board", "compares nothing new"],
  return: ["board", "shows one capture"],
};

/** @implements {Model} */
export class PageModel {
  /** @param {Payload[]} payloads the first is shown first @param {Timeline | null} [timeline] @param {BoardState} [board] */
  constructor(payloads, timeline = null, board = NO_BOARD) {
    this.payloads = payloads;
    /** @type {State} */
    this.state = { key: "", payload: payloads[0], selected: "", status: IDLE, live: false, timeline, step: null, board, tab: "" };
    /** @type {Map<string, Set<(...args: any[]) => void>>} */
    this.listeners = new Map();
  }

  /** @template {keyof State} K @param {K} name @returns {State[K]} */
  get(name) {
    return this.state[name];
  }

  /** @template {keyof State} K @param {K} name @param {State[K]} value */
  set(name, value) {
    this.state[name] = value;
    if (LINKED.has(name)) writeLink(linkOf(this));
    for (const listener of this.listeners.get(`change:${name}`) ?? []) listener();
  }

  save_changes() {}

  /** @param {string} event @param {(...args: any[]) => void} callback */
  on(event, callback) {
    this.listeners.set(event, (this.listeners.get(event) ?? new Set()).add(callback));
  }

  /** @param {string} event @param {(...args: any[]) => void} callback */
  off(event, callback) {
    this.listeners.get(event)?.delete(callback);
  }

  /** @param {Message} message */
  send(message) {
    if (message.type === "configure") this.configure(message.changes);
    else this.refuse(message.type);
  }

  /** @param {Partial<Config>} changes */
  configure(changes) {
    const found = this.find(changes);
    if (found) this.show(found);
    const [at] = Object.keys(changes);
    const error = found ? null : { panel: /** @type {const} */ ("passes"), at, message: missing(this.state.payload, changes) };
    this.set("status", { ...IDLE, error });
  }

  /** @param {Payload} payload one of its own */
  show(payload) {
    this.set("payload", payload);
    this.set("board", onShow(this.state.board, payload));
  }

  /** @param {Message["type"]} type */
  refuse(type) {
    const [panel, what] = NEEDS_KERNEL[type] ?? ["take", "does not know this request"];
    this.set("status", { ...IDLE, error: { panel, at: "", message: `A saved page ${what}: run it in a notebook.` } });
  }

  /** @param {Partial<Config>} changes */
  holds(changes) {
    return this.find(changes) !== undefined;
  }

  /** @param {Partial<Config>} changes */
  find(changes) {
    const wanted = { ...this.state.payload.config, ...changes };
    return this.payloads.find((payload) => same(payload.config, wanted));
  }
}

/** What a link says. @type {Set<keyof State>} */
const LINKED = new Set(["tab", "selected", "payload"]);

/** What is open, selected and shown, as the address has it behind "#"; "" at the beginning. @param {PageModel} model */
export function linkOf({ state, payloads }) {
  const found = new URLSearchParams();
  if (state.tab) found.set("tab", state.tab);
  if (state.selected) found.set("value", state.selected);
  const at = payloads.indexOf(state.payload);
  if (at > 0) found.set("configuration", String(at));
  return found.toString();
}

/** Put a link into effect; what the page does not have is left as it is. @param {PageModel} model @param {string} link */
export function follow(model, link) {
  const asked = new URLSearchParams(link.replace(/^#/, ""));
  const payload = model.payloads[Number(asked.get("configuration") ?? 0)];
  const { state } = model;
  if (payload) Object.assign(state, { payload, board: onShow(state.board, payload) });
  const value = asked.get("value") ?? "";
  if (value === "" || Object.hasOwn(state.payload.values, value)) state.selected = value;
  state.tab = asked.get("tab") ?? "";
}

/** In a file or on a server; a page within a notebook has no address of its own. @param {string} link */
function writeLink(link) {
  if (!["file:", "http:", "https:"].includes(globalThis.location?.protocol)) return;
  history.replaceState(null, "", link ? `#${link}` : location.pathname + location.search);
}

/** The board with the row marked that is shown now. @param {BoardState} board @param {Payload} shown @returns {BoardState} */
function onShow(board, { config }) {
  return { ...board, rows: board.rows.map((row) => ({ ...row, is_shown: row.capture === board.capture && same(row.config, config) })) };
}

/** @param {Config} one @param {Config} other */
function same(one, other) {
  return Object.keys(one).every((name) => JSON.stringify(one[name]) === JSON.stringify(other[name]));
}

/** @param {Payload} shown @param {Partial<Config>} changes */
function missing({ config, passes }, changes) {
  const wanted = { ...config, ...changes };
  const on = passes.map((one) => one.name).filter((name) => wanted[name] !== null && wanted[name] !== false);
  return `This saved page does not hold the combination “${on.join(" + ") || "no pass"}” with these options: run it in a notebook to see it.`;
}

/** A timeline whose events are text, as the view has it. @param {any} timeline @returns {Timeline | null} */
export function withEvents(timeline) {
  if (!timeline) return null;
  const programs = timeline.programs.map((/** @type {any} */ one) => ({ ...one, events: new DataView(bytesOf(one.events).buffer) }));
  return { ...timeline, programs };
}

/**
 * Show what the page holds, the text of `encode` in widgets/payload/pack.py, in `host`.
 * @param {(context: { model: any, el: HTMLElement }) => (() => void) | void} render @param {string} held @param {HTMLElement} host @param {string} styles of a page that is no explorer, which brings its own
 */
export async function mountPage(render, held, host, styles) {
  // Of the configurations that are not shown, nothing but the configuration is made: { payloads: [payload, …] }.
  const { payloads, timeline, board, run } = await decode(held, 3);
  if (run) return mountRun(run, /** @type {Timeline} */ (withEvents(timeline)), host, styles);
  const model = new PageModel(payloads, withEvents(timeline), board);
  const draw = () => {
    follow(model, location.hash);
    return render({ model, el: host });
  };
  let destroy = draw();
  // Of a link that is typed into the address; what the view writes there is none.
  window.addEventListener("hashchange", () => {
    destroy?.();
    host.replaceChildren();
    destroy = draw();
  });
  // The page is the view: its keys work before anything was clicked.
  /** @type {HTMLElement | null} */ (host.firstElementChild)?.focus({ preventScroll: true });
}
