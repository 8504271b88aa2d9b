// Undo and redo of every choice: passes and their options, what is pinned, whose times are shown. It needs no DOM.

/** @typedef {{ undo: Message, redo: Message }} Choice */

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

export class History {
  constructor() {
    /** @type {Choice[]} */
    this.choices = [];
    /** So many of them are in force. */
    this.at = 0;
    /** What there was before the last step, until that is answered. @type {{ choices: Choice[], at: number } | null} */
    this.before = null;
  }

  /** The last step is in force. */
  accept() {
    this.before = null;
  }

  /** The last step was refused: it was no choice, and what was undone before it can be made again. @returns {boolean} whether one waited for an answer */
  refuse() {
    const { before } = this;
    if (!before) return false;
    Object.assign(this, before, { before: null });
    return true;
  }

  begin() {
    this.before = { choices: [...this.choices], at: this.at };
  }

  /** Note a choice that is about to be made; what was undone before it is forgotten. @param {Message} message @param {Payload} payload */
  note(message, payload) {
    const undo = inverse(message, payload);
    if (!undo) return;
    this.begin();
    this.choices.splice(this.at, Infinity, { undo, redo: lasting(message, payload) });
    if (this.choices.length > MOST) this.choices.shift();
    this.at = this.choices.length;
  }

  get canUndo() {
    return this.at > 0;
  }

  get canRedo() {
    return this.at < this.choices.length;
  }

  /** What takes the last choice back, or null. @returns {Message | null} */
  undo() {
    if (!this.canUndo) return null;
    this.begin();
    this.at -= 1;
    return this.choices[this.at].undo;
  }

  /** What makes the choice again that was taken back last, or null. @returns {Message | null} */
  redo() {
    if (!this.canRedo) return null;
    this.begin();
    this.at += 1;
    return this.choices[this.at - 1].redo;
  }
}
