// Undo and redo of every choice: passes and their options, what is pinned, whose times are shown. It needs no DOM.

/** @typedef {{ undo: Message, redo: Message }} Choice */
/** @typedef {{ message: Message, choice: Choice, by: 1 | -1, forgotten?: Choice[] }} Step */

const MOST = 200;

/** The message that takes back what `message` asks for; null of one that chooses nothing. @param {Message} message @param {Payload} payload as it is before @returns {Message | null} */
export function inverse(message, { config, baseline, clock }) {
  if (message.type === "configure") {
    const changed = Object.keys(message.changes).filter((name) => JSON.stringify(message.changes[name]) !== JSON.stringify(config[name]));
    if (changed.length === 0) return null;
    return { type: "configure", changes: Object.fromEntries(changed.map((name) => [name, config[name]])) };
  }
  if (message.type === "return") return { ...message, ...message.back, back: { capture: message.capture, config: message.config } };
  if (message.type === "clock") return message.device === clock.chosen ? null : { type: "clock", device: clock.chosen };
  if (message.type === "pin" || message.type === "unpin") return baseline.is_pinned ? { type: "pin", config: baseline.config } : { type: "unpin" };
  return null;
}

/** A message that does the same whenever it is sent: a pin names what it pins. @param {Message} message @param {Payload} payload @returns {Message} */
const lasting = (message, { config }) => (message.type === "pin" && !message.config ? { type: "pin", config } : message);

/** Whether what `message` asks for is in force. @param {Message} message @param {Payload} payload */
function isIn(message, { config, baseline, clock }) {
  if (message.type === "configure") return Object.keys(message.changes).every((name) => JSON.stringify(message.changes[name]) === JSON.stringify(config[name]));
  if (message.type === "clock") return message.device === clock.chosen;
  if (message.type === "unpin" || message.type === "pin") return baseline.is_pinned === (message.type === "pin");
  return true;
}

export class History {
  constructor() {
    /** @type {Choice[]} */
    this.choices = [];
    /** So many of them are in force, or will be once they are answered. */
    this.at = 0;
    /** What was sent and is not answered, the oldest first; a new choice has made `forgotten` what was undone before it. @type {Step[]} */
    this.waiting = [];
  }

  /** What was chosen of the options and is not answered yet. @returns {Partial<Config>} */
  get pending() {
    return Object.assign({}, ...this.waiting.map(({ message }) => (message.type === "configure" ? message.changes : {})));
  }

  /** A payload came: it may answer what waits. @param {Payload} payload */
  accept(payload) {
    while (this.waiting.length > 0 && isIn(this.waiting[0].message, payload)) this.waiting.shift();
  }

  /** The kernel is done with a message, and with all before it. @param {Message} message @returns {boolean} whether it waited for an answer */
  answer(message) {
    const text = JSON.stringify(message);
    const at = this.waiting.findIndex((step) => JSON.stringify(step.message) === text);
    this.waiting.splice(0, at + 1);
    return at >= 0;
  }

  /** A step that waits was refused, in general the oldest: it was no choice, and what was undone before it can be made again. @returns {boolean} whether one waited for an answer */
  refuse(at = 0) {
    const [step] = this.waiting.splice(at, 1);
    if (!step) return false;
    this.at -= step.by;
    const place = this.choices.indexOf(step.choice);
    if (step.forgotten) this.choices.splice(place, 1, ...(place === this.choices.length - 1 ? step.forgotten : []));
    return true;
  }

  /** Nobody will answer. */
  giveUp() {
    while (this.refuse(-1));
  }

  /** Note a choice that is about to be made; what was undone before it is forgotten. @param {Message} message @param {Payload} payload */
  note(message, payload) {
    const undo = inverse(message, payload);
    if (!undo) return;
    const choice = { undo, redo: lasting(message, payload) };
    const forgotten = this.choices.splice(this.at, Infinity, choice);
    if (this.choices.length > MOST) this.choices.shift();
    this.at = this.choices.length;
    this.waiting.push({ message, choice, by: 1, forgotten });
  }

  get canUndo() {
    return this.at > 0;
  }

  get canRedo() {
    return this.at < this.choices.length;
  }

  /** What takes the last choice back, or null. @returns {Message | null} */
  undo() {
    return this.canUndo ? this.step(this.choices[this.at - 1], -1) : null;
  }

  /** What makes the choice again that was taken back last, or null. @returns {Message | null} */
  redo() {
    return this.canRedo ? this.step(this.choices[this.at], 1) : null;
  }

  /** @param {Choice} choice @param {1 | -1} by */
  step(choice, by) {
    const message = by > 0 ? choice.redo : choice.undo;
    this.at += by;
    this.waiting.push({ message, choice, by });
    return message;
  }
}
