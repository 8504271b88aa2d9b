// The lists of a configuration that name values: what they say of one value, and how they change. It needs no DOM.

const UNFREEZE = "!";

/** A glob of Python's fnmatch: `*`, `?` and `[...]`. @param {string} glob @param {string} name */
export function isMatch(glob, name) {
  const source = glob.replace(/\[(!?)([^\]]+)\]|\*|\?|[.+^${}()|[\]\\]/g, (text, not, set) =>
    set ? `[${not ? "^" : ""}${set.replace(/[\\\]^]/g, "\\$&")}]` : text === "*" ? ".*" : text === "?" ? "." : `\\${text}`,
  );
  return new RegExp(`^${source}$`, "s").test(name);
}

// --- freeze: patterns over parameters, the last match wins ------------------------------------------------------------

/** The pattern that freezes `name`, or "". @param {string[] | null} patterns @param {string} name */
export function frozenBy(patterns, name) {
  const last = (patterns ?? []).filter((pattern) => isMatch(withoutMark(pattern), name)).at(-1) ?? "";
  return last.startsWith(UNFREEZE) ? "" : last;
}

/** `patterns` with `name` frozen, or trained. @param {string[] | null} patterns @param {string} name @param {boolean} freeze @returns {string[]} */
export function frozen(patterns, name, freeze) {
  const others = (patterns ?? []).filter((pattern) => withoutMark(pattern) !== name);
  if (Boolean(frozenBy(others, name)) === freeze) return others;
  return [...others, freeze ? name : UNFREEZE + name];
}

/** @param {string} pattern */
function withoutMark(pattern) {
  return pattern.startsWith(UNFREEZE) ? pattern.slice(1) : pattern;
}

/**
 * The parameter that a value is, or is the gradient of; "" where it is neither. A gradient names an input of the trace, and
 * that has the parameter's own name.
 * @param {string} name @param {Record<string, Value>} values
 */
export function parameterOf(name, values) {
  const of = values[name]?.of ?? "";
  return (of && values[of]?.of) || of;
}

/** Whether the trace as captured has a gradient of `parameter`. @param {string} parameter @param {Record<string, Value>} values */
export function hasGradient(parameter, values) {
  return Object.entries(values).some(([name, value]) => value.op !== "placeholder" && parameterOf(name, values) === parameter);
}

// --- remat: save or recompute -----------------------------------------------------------------------------------------

/** @typedef {"save" | "recompute" | "auto"} Pin */

/** @param {Config} config @param {string} name @returns {Pin} */
export function pinOf({ save, recompute }, name) {
  return save.includes(name) ? "save" : recompute.includes(name) ? "recompute" : "auto";
}

/** What pins `name`, which may be a glob already in the lists. @param {Config} config @param {string} name @param {Pin} pin @returns {Partial<Config>} */
export function pinned({ save, recompute }, name, pin) {
  const lists = { save: save.filter((one) => one !== name), recompute: recompute.filter((one) => one !== name) };
  if (pin !== "auto") lists[pin].push(name);
  return lists;
}
