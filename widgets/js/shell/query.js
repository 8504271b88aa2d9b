// The language of the search field: words and filters, all of which must hold. It needs no DOM.
//
//   query  := term (" " term)*          all of them
//   term   := "-"? (word | filter)      "-" negates
//   word   := text | '"' text '"'       in name, op, module, kernel or source
//   filter := KEY ":" text | "saved" | "removed" | ("<" | ">") number unit

/** @typedef {(name: string, value: Value) => boolean} Test */
/** @typedef {{ tests: Test[], hints: string[], words: string[] }} Query hints say what was not understood, or cannot be found; words are those that must be there */

const TERM = /(-?)((?:[\w]+:)?"[^"]*"?|\S+)/g;
const LIMIT = /^([<>])=?(\d*\.?\d+)([a-zµμ]*)$/i;
/** µs @type {Record<string, number>} */
const TIMES = { ns: 1e-3, us: 1, µs: 1, μs: 1, ms: 1e3, s: 1e6 };
/** @type {Record<string, number>} */
const BYTES = { b: 1, kb: 1e3, mb: 1e6, gb: 1e9, kib: 2 ** 10, mib: 2 ** 20, gib: 2 ** 30 };
/** @type {Record<string, Test>} */
const FLAGS = { saved: (_, value) => value.saved_bytes > 0, removed: (_, value) => value.removed };
const DTYPE = /\b(?:[a-z]+\d+\w*|bool|complex\d+)(?=\[)/g;

/** @type {Record<string, (wanted: string, values: Record<string, Value>, hints: string[]) => Test>} */
const FILTERS = {
  op: (wanted) => byPart(wanted, (value) => [value.op]),
  module: (wanted) => byPart(wanted, (value) => [value.module, value.module_type]),
  kernel: (wanted) => (_, value) => value.kernel !== "" && value.kernel.toLowerCase().includes(wanted),
  dtype: (wanted, values, hints) => {
    const known = new Set(Object.values(values).flatMap(dtypes));
    if (!known.has(wanted)) hints.push(`No value is “${wanted}” here; there are ${[...known].sort().join(", ")}.`);
    return (_, value) => dtypes(value).includes(wanted);
  },
  phase: (wanted, _values, hints) => {
    const phase = ["forward", "backward", "update"].find((one) => one.startsWith(wanted));
    if (!phase) hints.push("A phase is forward, backward or update.");
    return (_, value) => value.phase === phase;
  },
};

/** @param {string} text @param {Record<string, Value>} values @returns {Query} */
export function parse(text, values) {
  /** @type {string[]} */
  const hints = [];
  /** @type {string[]} */
  const words = [];
  const tests = [...text.matchAll(TERM)].map(([, minus, term]) => {
    const test = testOf(term.toLowerCase(), values, hints);
    if (!minus && !/[:<>]/.test(term)) words.push(unquoted(term.toLowerCase()));
    return minus ? negated(test) : test;
  });
  return { tests, hints, words };
}

/** What a value is called: its name, its operator, its module and that one's last part and class, its kernel. @param {string} name @param {Value} value */
const calls = (name, { op, module, module_type: type, kernel }) => [name, op, op.replace(/^aten\.(\w+).*$/, "$1"), module, module.slice(module.lastIndexOf(".") + 1), type, kernel].map((text) => text.toLowerCase());

/** 0 for what is called so, 1 for what has it as a whole part of its name, 2 for what contains it somewhere. @param {Query} query @param {string} name @param {Value} value */
export function rank({ words }, name, value) {
  const names = calls(name, value);
  const of = (/** @type {string} */ word) => {
    if (names.includes(word)) return 0;
    return names.some((text) => text.split(/[._]/).includes(word)) ? 1 : 2;
  };
  return Math.max(0, ...words.map(of));
}

/** Names of the values for which everything holds; null where nothing is searched for. @param {Query} query @param {Record<string, Value>} values @returns {Set<string> | null} */
export function found({ tests }, values) {
  if (tests.length === 0) return null;
  return new Set(Object.keys(values).filter((name) => tests.every((test) => test(name, values[name]))));
}

/** @param {string} term @param {Record<string, Value>} values @param {string[]} hints @returns {Test} */
function testOf(term, values, hints) {
  if (Object.hasOwn(FLAGS, term)) return FLAGS[term];
  const limit = LIMIT.exec(term);
  if (limit) return limited(limit[1], Number(limit[2]), limit[3], hints);
  const [, key, wanted] = /^(\w+):(.*)$/.exec(term) ?? [];
  const isFilter = key !== undefined && Object.hasOwn(FILTERS, key);
  // A filter that is being typed takes nothing away yet; "kernel:" alone has a meaning.
  if (isFilter && !wanted && key !== "kernel") return () => true;
  if (isFilter) return FILTERS[key](unquoted(wanted), values, hints);
  if (key && /^[a-z]+$/.test(key) && !Object.values(values).some((value) => value.source.toLowerCase().includes(term))) {
    hints.push(`No filter “${key}:”; there are ${Object.keys(FILTERS).map((one) => `${one}:`).join(" ")} saved removed >1ms <2MiB.`);
  }
  return word(unquoted(term));
}

/** @param {string} text */
const unquoted = (text) => text.replaceAll('"', "");

/** @param {string} wanted @returns {Test} */
function word(wanted) {
  return (name, { op, module, module_type: type, kernel, source }) => [name, op, module, type, kernel, source].some((text) => text.toLowerCase().includes(wanted));
}

/** @param {Test} test @returns {Test} */
const negated = (test) => (name, value) => !test(name, value);

/**
 * Whole parts of a dotted or underscored name: "mm" is `aten.mm.default` and not `addmm`, "h.1" is not "h.10"; "*" stands for
 * anything. @param {string} wanted @param {(value: Value) => string[]} texts @returns {Test}
 */
function byPart(wanted, texts) {
  const pattern = wanted.replace(/[.+?^${}()|[\]\\]/g, "\\$&").replaceAll("*", "[^.]*");
  const whole = new RegExp(`(^|[._])${pattern}($|[._])`);
  return (_, value) => texts(value).some((text) => whole.test(text.toLowerCase()));
}

/** @param {Value} value @returns {string[]} */
function dtypes({ type }) {
  return type.match(DTYPE) ?? [];
}

/** Time or bytes, as the unit says: after the passes, or before them of what they removed. @param {string} sign @param {number} number @param {string} unit @param {string[]} hints @returns {Test} */
function limited(sign, number, unit, hints) {
  const of = Object.hasOwn(TIMES, unit) ? timeOf : Object.hasOwn(BYTES, unit) ? bytesOf : null;
  if (!of) hints.push(`“${sign}${number}${unit}” needs a unit: ns us ms s for times, B KiB MiB GiB for bytes.`);
  if (!of) return () => true;
  const limit = number * (TIMES[unit] ?? BYTES[unit]);
  return (_, value) => {
    const amount = of(value);
    return amount !== null && (sign === ">" ? amount > limit : amount < limit);
  };
}

/** @param {Value} value */
const timeOf = ({ removed, time_us: us }) => us[removed ? 0 : 1];
/** @param {Value} value */
const bytesOf = ({ nbytes }) => nbytes;
