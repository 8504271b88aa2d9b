// A page without a kernel: a model that answers from the configurations that were computed when the page was written.

/** Not set while the page has no such configuration. @type {Status} */
const IDLE = { busy: "", progress: null, text: "", error: null };

/** @implements {Model} */
class PageModel {
  /** @param {Payload[]} payloads the first is shown first */
  constructor(payloads) {
    this.payloads = payloads;
    /** @type {State} */
    this.state = { payload: payloads[0], selected: "", status: IDLE, live: false, timeline: null };
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
    if (message.type !== "configure") return;
    const found = this.find(message.changes);
    if (found) this.set("payload", found);
    const [at] = Object.keys(message.changes);
    const error = found ? null : { panel: /** @type {const} */ ("passes"), at, message: missing(this.state.payload, message.changes) };
    this.set("status", { ...IDLE, error });
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

/** @param {Config} one @param {Config} other */
function same(one, other) {
  return Object.keys(one).every((name) => JSON.stringify(one[name]) === JSON.stringify(other[name]));
}

/** @param {Payload} shown @param {Partial<Config>} changes */
function missing({ config, passes }, changes) {
  const wanted = { ...config, ...changes };
  const on = passes.map((one) => one.name).filter((name) => wanted[name] !== null && wanted[name] !== false);
  return `This saved page does not hold the combination “${on.join(" + ") || "no pass"}” with these options: run the cell in a notebook to see it.`;
}

/**
 * Show the payloads of the page's JSON element in `host`.
 * @param {(context: { model: any, el: HTMLElement }) => void} render @param {Payload[]} payloads @param {HTMLElement} host
 */
export function mountPage(render, payloads, host) {
  render({ model: new PageModel(payloads), el: host });
  // The page is the view: its keys work before anything was clicked.
  /** @type {HTMLElement | null} */ (host.firstElementChild)?.focus({ preventScroll: true });
}
