// Events on lanes: their columns of numbers, their kinds, and an index by time. All times are in µs from the program's start.

/** What an event does, hence its colour; the glyph says it without one. The first rule that fits an operator's name decides. */
export const KINDS = [
  { id: "kernel", colour: "good", label: "fused kernel", glyph: "◆", names: /^fused_|^triton_/ },
  { id: "attention", colour: "twin", label: "attention", glyph: "⌾", names: /attention|flash|fmha/i },
  { id: "matmul", colour: "brand", label: "matmul", glyph: "▦", names: /mm\b|mm_|mma|matmul|linear|convol|einsum|nvjet|cutlass/i },
  { id: "copy", colour: "string", label: "copy", glyph: "⇄", names: /copy|clone|\bcat\b|memcpy|memset|contiguous|\bstack\b|catarray/i },
  { id: "reduction", colour: "number", label: "reduction", glyph: "Σ", names: /sum|mean|softmax|norm|amax|max|min|\bvar|argm|loss|reduce/i },
  { id: "wait", colour: "warn", label: "host waits", glyph: "‖", names: /Synchronize$/ },
  { id: "other", colour: "soft", label: "other", glyph: "·", names: /(?:)/ },
  { id: "idle", colour: "bad", label: "idle", glyph: "▨", names: /(?:)/ },
  { id: "pause", colour: "soft", label: "idle, inherent", glyph: "░", names: /^(launch latency|(start|end) of the window)/ },
];
export const [IDLE, PAUSE] = [KINDS.length - 2, KINDS.length - 1];

/** @param {string} name of an operator or a kernel */
export const kindOf = (name) => KINDS.findIndex((kind) => kind.names.test(name));

const BYTES_PER_EVENT = 26;

/** Whether a lane has what the GPU did. @param {{ kind: string }} lane */
export const isGpu = ({ kind }) => kind === "gpu" || kind === "copy";

/** `delay` is from a launch to the start on the GPU, NaN without one. @typedef {{ start: Float64Array, duration: Float32Array, name: Uint32Array, value: Uint32Array, delay: Float32Array, lane: Uint16Array }} Columns */

/**
 * One lane: indices of its events by start; `reach[i]` is the latest end of the first i + 1 of them. `backward` and `update` are
 * where its first event of that phase starts, NaN without one.
 * @typedef {{ name: string, kind: "gpu" | "copy" | "idle" | "range" | "cpu", at: Uint32Array, reach: Float64Array, backward: number, update: number }} Lane
 */

/**
 * @typedef {object} Program
 * @property {string} label
 * @property {string} config
 * @property {number} span
 * @property {Lane[]} lanes
 * @property {string[]} names of operators and kernels
 * @property {string[]} values the ops' values in program order
 * @property {Map<string, number>} numbers of the values, as the column `value` has them: from 1
 * @property {Columns} columns
 * @property {Uint32Array} ops of each event, the operator that it belongs to, as an index into names; a kernel's own without one
 * @property {Uint8Array} kinds of each event, as indices into KINDS
 */

/** The columns of a program's bytes. Raises RangeError where there are fewer than `count` events need. @param {{ count: number, events: DataView }} program @returns {Columns} */
export function decode({ count, events }) {
  const length = count * BYTES_PER_EVENT;
  if (events.byteLength < length) throw new RangeError(`${count} events take ${length} bytes, not ${events.byteLength}`);
  // A copy, since a typed array must begin where its type is aligned.
  const bytes = events.buffer.slice(events.byteOffset, events.byteOffset + length);
  return {
    start: new Float64Array(bytes, 0, count),
    duration: new Float32Array(bytes, 8 * count, count),
    name: new Uint32Array(bytes, 12 * count, count),
    value: new Uint32Array(bytes, 16 * count, count),
    delay: new Float32Array(bytes, 20 * count, count),
    lane: new Uint16Array(bytes, 24 * count, count),
  };
}

/** The bytes that `decode` reads. @param {Columns} columns */
export function encode(columns) {
  const parts = [columns.start, columns.duration, columns.name, columns.value, columns.delay, columns.lane];
  const bytes = new Uint8Array(columns.start.length * BYTES_PER_EVENT);
  let offset = 0;
  for (const part of parts) {
    bytes.set(new Uint8Array(part.buffer, part.byteOffset, part.byteLength), offset);
    offset += part.byteLength;
  }
  return new DataView(bytes.buffer);
}

/**
 * A measured program, indexed; its times are stretched so that it takes `stepUs`, what the step took without a profiler.
 * @param {TimelineProgram} raw @param {Record<string, Value>} records @param {number} [stepUs]
 */
export function measured(raw, records, stepUs) {
  const factor = stepUs && raw.span_us ? stepUs / raw.span_us : 1;
  const columns = decode(raw);
  for (const column of [columns.start, columns.duration, columns.delay]) for (let i = 0; i < column.length; i += 1) column[i] *= factor;
  return indexed({ ...raw, span_us: factor * raw.span_us }, columns, records);
}

/**
 * The ops of a trace laid end to end on one lane, each as long as its own time; ops that take none have no event.
 * @param {string} label @param {string[]} ops in the order of the trace @param {Record<string, Value>} records @param {0 | 1} which before or after the passes
 * @returns {Program}
 */
export function modelled(label, ops, records, which) {
  const time = (/** @type {string} */ op) => records[op]?.time_us[which] ?? 0;
  const timed = ops.map((op, i) => ({ op, number: i + 1 })).filter(({ op }) => time(op) > 0);
  // A record's operator is that of the optimised program; where that is a kernel, a name still says what it was called after.
  const called = (/** @type {string} */ op) => (which === 0 && records[op].kernel ? op.replace(/_\d+$/, "") : records[op].op);
  const names = [...new Set(timed.map(({ op }) => called(op)))];
  const number = new Map(names.map((name, i) => [name, i]));
  const start = new Float64Array(timed.length);
  for (let i = 1; i < timed.length; i += 1) start[i] = start[i - 1] + Math.fround(time(timed[i - 1].op));
  const columns = {
    start,
    duration: Float32Array.from(timed, ({ op }) => time(op)),
    name: Uint32Array.from(timed, ({ op }) => number.get(called(op)) ?? 0),
    value: Uint32Array.from(timed, (one) => one.number),
    delay: new Float32Array(timed.length).fill(NaN),
    lane: new Uint16Array(timed.length),
  };
  const span = timed.length === 0 ? 0 : start[start.length - 1] + columns.duration[start.length - 1];
  return indexed({ label, config: "", span_us: span, lanes: [{ name: "end to end", kind: "cpu" }], names, values: ops }, columns, records);
}

/** @param {Omit<TimelineProgram, "count" | "events">} raw @param {Columns} columns @param {Record<string, Value>} records @returns {Program} */
function indexed(raw, columns, records) {
  const { label, config, names, values, span_us: span } = raw;
  const ops = opsOf(raw.lanes, columns);
  const ofName = names.map(kindOf);
  const copy = KINDS.findIndex((kind) => kind.id === "copy");
  const kinds = Uint8Array.from(ops, (op, i) => {
    const { kind } = raw.lanes[columns.lane[i]];
    if (kind === "idle") return KINDS[PAUSE].names.test(names[op]) ? PAUSE : IDLE;
    return kind === "copy" ? copy : ofName[op];
  });
  const phases = values.map((name) => records[name]?.phase);
  const lanes = raw.lanes.map((lane, number) => indexedLane(lane, number, columns, phases));
  return { label, config, span, lanes, names, values, numbers: new Map(values.map((name, i) => [name, i + 1])), columns, ops, kinds };
}

/**
 * What each event is called: as the host called the op of its value, since the names of kernels say less of it.
 * @param {TimelineProgram["lanes"]} lanes @param {Columns} columns
 */
function opsOf(lanes, { name, value, lane }) {
  /** @type {Map<number, number>} */
  const ofValue = new Map();
  lane.forEach((number, i) => lanes[number].kind === "cpu" && value[i] > 0 && ofValue.set(value[i], name[i]));
  return name.map((own, i) => (lanes[lane[i]].kind === "gpu" ? (ofValue.get(value[i]) ?? own) : own));
}

/** @param {TimelineProgram["lanes"][number]} lane @param {number} number @param {Columns} columns @param {(Value["phase"] | undefined)[]} phases of each value @returns {Lane} */
function indexedLane(lane, number, { start, duration, lane: lanes, value }, phases) {
  const at = new Uint32Array(lanes.reduce((count, one) => count + Number(one === number), 0));
  const reach = new Float64Array(at.length);
  const begins = { forward: NaN, backward: NaN, update: NaN };
  let count = 0;
  let latest = -Infinity;
  for (let i = 0; i < lanes.length; i += 1) {
    if (lanes[i] !== number) continue;
    latest = Math.max(latest, start[i] + duration[i]);
    at[count] = i;
    reach[count] = latest;
    count += 1;
    const phase = value[i] > 0 ? phases[value[i] - 1] : undefined;
    if (phase && Number.isNaN(begins[phase])) begins[phase] = start[i];
  }
  return { ...lane, at, reach, backward: begins.backward, update: begins.update };
}

// --- questions ---------------------------------------------------------------------------------------------------------

/** The first of `length` positions that `is` holds for, which then holds for all after it. @param {number} length @param {(at: number) => boolean} is */
export function first(length, is) {
  let low = 0;
  let high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (is(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** Which positions of a lane may touch the time between: [first, end). @param {Program} program @param {Lane} lane @param {number} from @param {number} to */
export function between({ columns }, lane, from, to) {
  const begin = first(lane.at.length, (i) => lane.reach[i] > from);
  const end = first(lane.at.length, (i) => columns.start[lane.at[i]] >= to);
  return [begin, Math.max(begin, end)];
}

/**
 * The event nearest to `time`, at most `tolerance` away; of several at it, the one that began last. -1 if there is none.
 * @param {Program} program @param {Lane} lane @param {number} time @param {number} tolerance
 */
export function nearest(program, lane, time, tolerance) {
  const { start, duration } = program.columns;
  const [begin, end] = between(program, lane, time - tolerance - 1e-9, time + tolerance + 1e-9);
  let found = -1;
  let least = tolerance;
  for (let i = begin; i < end; i += 1) {
    const event = lane.at[i];
    const away = Math.max(start[event] - time, time - start[event] - duration[event], 0);
    if (away > least) continue;
    least = away;
    found = event;
  }
  return found;
}

/** Of the events of one value those of the GPU, if there are any: then the CPU's are what asking for them took. @param {Program} program @param {number[]} events */
export function atWork({ columns, lanes }, events) {
  const onGpu = events.filter((event) => isGpu(lanes[columns.lane[event]]));
  return onGpu.length > 0 ? onGpu : events.filter((event) => lanes[columns.lane[event]].kind === "cpu");
}

/** The events of a value, in order. @param {Program} program @param {string} value @returns {number[]} */
export function eventsOf({ columns, numbers }, value) {
  const number = numbers.get(value);
  /** @type {number[]} */
  const found = [];
  columns.value.forEach((one, event) => one === number && found.push(event));
  return found;
}

// Shorter pauses are what rounding leaves between two events that touch.
const LEAST_GAP_US = 1e-3;

/**
 * What a lane did from `from` to `to`: `busy` and `idle` add up to the range; `gaps` counts the pauses in it.
 * @param {Program} program @param {Lane} lane @param {number} from @param {number} to
 */
export function sums(program, lane, from, to) {
  const { start, duration } = program.columns;
  const { names, ops } = program;
  const [begin, end] = between(program, lane, from, to);
  /** @type {Map<number, { name: string, time: number, count: number }>} */
  const byName = new Map();
  const found = { busy: 0, idle: 0, gaps: 0, longest: 0, count: 0 };
  const pause = (/** @type {number} */ gap) => {
    if (gap < LEAST_GAP_US) return;
    found.gaps += 1;
    found.longest = Math.max(found.longest, gap);
  };
  let reached = from;
  for (let i = begin; i < end; i += 1) {
    const event = lane.at[i];
    const left = Math.max(start[event], from);
    const right = Math.min(start[event] + duration[event], to);
    if (right < left) continue;
    found.count += 1;
    const total = byName.get(ops[event]) ?? { name: names[ops[event]], time: 0, count: 0 };
    total.time += right - left;
    total.count += 1;
    byName.set(ops[event], total);
    pause(left - reached);
    found.busy += Math.max(0, right - Math.max(left, reached));
    reached = Math.max(reached, right);
  }
  pause(to - reached);
  found.idle = to - from - found.busy;
  return { ...found, top: [...byName.values()].sort((a, b) => b.time - a.time) };
}

/**
 * A lane as what can be seen of it: `draw(x, width, kind, share, event, faint)` in pixels from the left of the window. Events
 * narrower than 1½ pixels share their column: it has the kind of most of their time, `share` is how much of it they cover, and
 * `event` is -1. Faint is what `isFound`, where there is one, says of every event in it.
 * @param {Program} program @param {Lane} lane @param {{ from: number, to: number }} window @param {number} pixels
 * @param {Uint8Array | null} isFound of each event
 * @param {(x: number, width: number, kind: number, share: number, event: number, faint: boolean) => void} draw
 */
export function spans(program, lane, window, pixels, isFound, draw) {
  const { start, duration } = program.columns;
  const scale = pixels / (window.to - window.from);
  const [begin, end] = between(program, lane, window.from, window.to);
  const times = new Float64Array(KINDS.length);
  let column = -1;
  let total = 0;
  let anyFound = false;
  const flush = () => {
    if (column < 0) return;
    draw(column, 1, times.indexOf(Math.max(...times)), Math.min(1, total * scale), -1, !anyFound);
    times.fill(0);
    column = -1;
    total = 0;
    anyFound = false;
  };
  for (let i = begin; i < end; i += 1) {
    const event = lane.at[i];
    const x = (start[event] - window.from) * scale;
    const width = duration[event] * scale;
    const found = !isFound || isFound[event] === 1;
    if (width >= 1.5) {
      flush();
      const left = Math.max(0, x);
      draw(left, Math.min(pixels, x + width) - left, program.kinds[event], 1, event, !found);
      continue;
    }
    const at = Math.max(0, Math.floor(x));
    if (at !== column) flush();
    // What was found must not hide behind what was not.
    if (found && !anyFound) times.fill(0);
    if (found || !anyFound) times[program.kinds[event]] += duration[event] + 1e-12;
    column = at;
    total += duration[event];
    anyFound ||= found;
  }
  flush();
}

/** How much of its time a program's busiest lane is busy, per pixel of the whole axis. @param {Program} program @param {number} span @param {number} pixels */
export function shares(program, span, pixels) {
  const found = new Float64Array(pixels);
  for (const lane of program.lanes.filter((one) => isGpu(one) || one.kind === "cpu")) {
    spans(program, lane, { from: 0, to: span }, pixels, null, (x, width, _, share) => {
      for (let at = Math.floor(x); at < Math.min(pixels, x + width); at += 1) found[at] = Math.max(found[at], share);
    });
  }
  return found;
}
