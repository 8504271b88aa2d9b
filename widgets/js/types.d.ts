// The wire format, which widgets/payload/program.py makes.

declare module "*.css" {
  const text: string;
  export default text;
}

interface Config {
  simplify: boolean;
  freeze: string[] | null;
  cat: boolean;
  decompose: boolean;
  channels_last: boolean;
  pad: boolean;
  remat: number | null;
  /** A fraction up to 1, or bytes. */
  memory_budget: number | null;
  /** Bytes. */
  peak_budget: number | null;
  remat_options: Record<string, string | boolean>;
  /** Pins: names, globs or module paths. */
  save: string[];
  recompute: string[];
  fuse: boolean;
  /** A pass of the user's own: off, on, or on with options. */
  [more: string]: unknown;
}

interface PassOption {
  name: string;
  kind: "switch" | "number" | "text";
  /** A boolean for a switch, else text. */
  value: any;
  default: any;
  help: string;
}

interface Line {
  code: string;
  comment: string;
  value: string;
  kind: "signature" | "input" | "group" | "op" | "free" | "return" | "blank";
  diff: " " | "+" | "-" | "~";
  /** Of two texts side by side, and never on the wire: the part of the code that the other one has not. */
  differs?: [number, number];
  /** Likewise: nothing, beside a line that came or went. */
  filler?: boolean;
}

interface Half {
  lines: Line[];
  ops: [number, number];
  added: number;
  removed: number;
}

interface Value {
  op: string;
  type: string;
  stride: number[] | null;
  nbytes: number;
  phase: "forward" | "backward" | "update";
  /** Path of the nn.Module, "" outside any. */
  module: string;
  module_type: string;
  source: string;
  /** Of a kernel that does the work of several lines: those, with the share of its time that each has by the model, the largest first; else empty. */
  lines: [string, number][];
  reads: string[];
  uses: string[];
  twins: string[];
  /** Bytes of its storage where that is kept for the backward, each counted for one value; else 0. */
  saved_bytes: number;
  removed: boolean;
  /** Other values in the same memory. */
  storage: string[];
  /** The Triton kernel that computes it, or "". */
  kernel: string;
  /** The parameter that an input is, or whose gradient an output is, or "". */
  of: string;
  /** Before and after the passes; null where its op is not in that trace or takes no time. */
  time_us: [number | null, number | null];
}

/** Bytes alive while each op runs, in the order of the ops. */
interface Memory {
  ops: string[];
  live: number[];
  peak: number;
  /** The op at the peak. */
  at: string;
  /** The largest storages alive at the peak, by their first value, and their bytes. */
  alive: [string, number][];
  /** Bytes of inputs, parameters and buffers, alive throughout. */
  inputs: number;
  /** Ops that compute again what the forward computed, kernels that do so among them, by their places among `ops`. */
  again: number[];
  /** Of every other storage: first op, last op, bytes, purpose (an index into `PURPOSES`), one after another. */
  storages: number[];
}

/** What is alive in the op with the most bytes, before and after the passes. */
interface AtPeak {
  /** What storages are there for, with their bytes. */
  purposes: [string, number, number][];
  /** Of those that are saved: module, identical ones as one; reason; bytes before and after; storages after, and the largest one's value. */
  saved: [string, string, number, number, number, string][];
  /** Those ops; "" of a program without any. */
  at: [string, string];
}

/** All decisions with one action and one reason. */
interface Decision {
  action: string;
  reason: string;
  nbytes: number;
  values: string[];
}

interface PassRecord {
  name: string;
  help: string;
  /** It was registered by the user. */
  own: boolean;
  enabled: boolean;
  /** "on", "off", or "off: needs fuse": then its own switch changes nothing. */
  state: string;
  /** What to know of it beside the other passes, or "". */
  note: string;
  /** It ran, and the program that it left is not the one that it was given. */
  changed: boolean;
  ops: [number, number] | null;
  saved_bytes: [number, number] | null;
  /** Static. */
  peak_bytes: [number, number] | null;
  seconds: number | null;
  /** Those without a control of their own. */
  options: PassOption[];
  error: string | null;
  /** What the pass alone adds to the step: with it minus without it, all others kept. Null until it was measured. */
  delta_ms: (Interval & { provenance: string; stale: boolean }) | null;
  /** What it changed of the step, by the clock, in the order of the pipeline: they sum to what all passes changed. */
  delta_us: number | null;
  /** The whole step without it, all others kept, beside the shown one's in `summary` and `clock`; null where it changes nothing, and until that is known. */
  without: { ops: number; saved_bytes: number; peak_bytes: number; step_us: number; kind: TimeKind } | null;
  /** What it would need to change something, or why it left it; "" where it changed something. */
  needs: string;
  /** The patterns that `needs` speaks of. */
  suggests: string[];
}

/** Whose times the whole view shows: one device, one kind for each side. */
interface Clock {
  device: string;
  kinds: [TimeKind, TimeKind];
  /** The sums of all ops, before and after. */
  step_us: [number, number];
  /** What a step takes: its kernels, or launching them where that is modelled to take longer. */
  takes_us: [number, number];
  /** The launches of both steps, where launching those of the shown one takes longer than its kernels run. */
  launches: [number, number] | null;
  provenance: [string, string];
  /** Values of the shown program whose time was not measured, where others' were. */
  predicted: string[];
  /** "here" for the program's own device, else a GPU that it is modelled for. */
  chosen: string;
  choices: [string, string][];
  /** The timed step of each configuration that was measured on the program's own device, in µs, by its call. */
  replays: Record<string, number>;
  /** So many predictions were measured later, and their median relative error. */
  forecasts: number;
  error: number | null;
}

type TimeKind = "measured" | "predicted" | "modelled";

/** A half with the whole text before it. */
type TwoTexts = Half & { before: Line[] };

/** Both halves, and the update, as one pass leaves them, marked against what it was given; of the pass "*" as all leave them. */
interface PassDiff {
  pass: string;
  forward: TwoTexts;
  backward: TwoTexts;
  /** Null of a program without one. */
  update: TwoTexts | null;
}

/** A median, and an interval that covers the true one with probability `coverage`: less than 0.95 of few samples. */
interface Interval {
  median: number;
  low: number;
  high: number;
  coverage: number;
  samples: number;
}

interface TimingRow {
  label: string;
  /** "optimised" of the program that is shown; others have columns of their own. */
  program: string;
  phase: string;
  baseline_ms: Interval | null;
  variant_ms: Interval | null;
  ratio: Interval | null;
  verdict: string;
}

interface Timing {
  provenance: string;
  stale: boolean;
  /** Whether the times before are of a pinned configuration, not of the captured program. */
  is_pinned: boolean;
  config: string;
  rows: TimingRow[];
  /** Kernels, regions and the whole step; none without a GPU. */
  work: { label: string; calls: number | null; us: number; note: string }[];
  notes: string[];
}

interface KernelRecord {
  name: string;
  /** As a person says it: "layer_norm + gelu of h.*.mlp ×12". */
  said: string;
  /** The value of its first call. */
  part: string;
  /** The ops that all its calls stand for; null where no pass made it. `us` is null where parts of them were not timed apart. */
  replaces: { ops: [string, number][]; launches: number; again: number; us: number | null; nbytes: number } | null;
  kind: TimeKind | "";
  calls: number;
  ops: string[];
  nbytes_read: number;
  nbytes_written: number;
  time_us: number | null;
  provenance: string;
  /** Whether its block sizes were found by trial. */
  blocks: "tuned" | "guess";
  source: string;
  /** Of the time of one call, all its launches: of the bytes that it must move, and of a matmul's arithmetic; null without a measured time. */
  gb_per_s: number | null;
  tflop_per_s: number | null;
  /** What the roof that is its bound allows. */
  least_us: number | null;
  /** What is reached of that, and whose roof it is. */
  peak_share: number | null;
  peak_source: string;
  /** "launch": it is over before the next launch. */
  bound: "memory" | "compute" | "launch" | "";
  /** What one program takes; null until asked for. */
  resources: { registers: number; shared_bytes: number; spills: number; target: string } | null;
}

/** An ATen operator with all its calls on operands of one type, measured op by op. */
type AtenRecord = Pick<KernelRecord, "name" | "said" | "kind" | "calls" | "provenance" | "gb_per_s" | "tflop_per_s" | "least_us" | "peak_share" | "peak_source" | "bound"> & { time_us: number; nbytes: number; values: string[] };

/** Own ops of one nn.Module, children not counted; "before, after" the passes. In the forward's order. */
interface LayerRow {
  path: string;
  /** The path with "*" for the numbers that tell it from modules like it. */
  folded: string;
  module_type: string;
  forward_ops: [number, number];
  backward_ops: [number, number];
  forward_us: [number, number];
  backward_us: [number, number];
  update_ops: [number, number];
  update_us: [number, number];
  saved_bytes: [number, number];
  /** What takes most of the backward as shown: "pointwise 61 %", "cat 22 %", "matmul 80 %"; "" where there is none. */
  cause: string;
  /** µs of the backward by kind of work, before and after. */
  backward_kinds: [Record<string, number>, Record<string, number>];
  /** Of the matmuls in the forward and in the backward, before and after. */
  flops: [[number, number], [number, number]];
}

interface Finding {
  /** The same for what is found at the same place again. */
  key: string;
  /** Its kind. */
  id: string;
  severity: "high" | "medium" | "low";
  title: string;
  /** Label and figure. */
  evidence: [string, string][];
  values: string[];
  source: string;
  fix: string;
  worth: string;
  /** How the worth is known; "" of one that names no time. */
  kind: TimeKind | "";
  /** The same in microseconds, and as a share of the step: null where it names no time. */
  worth_us: number | null;
  worth_share: number | null;
  /** What tries the fix, if a switch can. */
  changes: Partial<Config> | null;
  /** Which passes that are on mend it, and what they leave; "" where none can. */
  mended: string;
  /** Their names. */
  mended_by: string[];
  /** Whether they leave nothing of it. */
  is_mended: boolean;
  /** Of a step that waits for launches, how many of a GPU's mending what is left of it spares at most. */
  launches: number;
  /** Of how many: those of the program as it ran, or with the passes where they left some of it. */
  launches_of: number;
  code: string;
  /** How the worth of what they leave is known; "" where they leave nothing. */
  left_kind: TimeKind | "";
  /** That worth, and its share of the step. */
  left: string;
  left_share: number | null;
  /** Parts of the time of what it is about, one after another. */
  bars: Bar[];
  trials: Trial[];
}

interface Bar {
  label: string;
  us: number;
  /** "measured on …" or "modelled: …". */
  provenance: string;
}

/** What a replay can test, and what it said. */
interface Trial {
  does: string;
  /** Why it cannot run here, or "". */
  blocked: string;
  /** "faster", "slower", or why neither; "" where it did not run yet, as `said`. */
  verdict: string;
  said: string;
}

/** One profiled replay of each program, both from 0 µs. */
interface Timeline {
  provenance: string;
  /** Of idle time, in a sentence each. */
  causes: Record<string, string>;
  programs: TimelineProgram[];
}

interface TimelineProgram {
  label: string;
  config: string;
  span_us: number;
  lanes: { name: string; kind: "gpu" | "copy" | "idle" | "range" | "cpu" }[];
  names: string[];
  values: string[];
  count: number;
  /** Columns one after another, little endian, sorted by start: f8 start_us, f4 duration_us, u4 name, u4 value (0 none, else index + 1), f4 delay_us (NaN none), u2 lane. */
  events: DataView;
}

/** An op whose result nothing used. */
interface Unused {
  op: string;
  module: string;
  module_type: string;
  source: string;
  phase: "forward" | "backward";
  nbytes: number;
  time_us: number;
}

interface Payload {
  version: 2;
  config: Config;
  /** The same choice in Python; "" if no name holds the capture. */
  call: string;
  /** Lines of Python that compile and run it; "" where no name holds the capture. */
  usage: string;
  /** Why this variant can be neither measured nor exported. */
  blocked: string | null;
  /** Which step of a loop is shown, and each of them on a line; null of a single step. */
  steps: { said: string; each: string } | null;
  /** Why no ratio and no slowest module is told; "" where both are. */
  no_verdict: string;
  /** What paths of outermost modules begin with, but for the model that needs no name. */
  roots: string[];
  runs_triton: boolean;
  passes: PassRecord[];
  summary: {
    ops: [number, number];
    saved_bytes: [number, number];
    peak_bytes: [number, number];
    /** Bytes that the view counts and `peak_budget` does not, which bounds forward and backward alone: an optimizer's state. */
    beside_budget: number;
    /** What no budget gets the peak of the optimised program below, whatever is recomputed. */
    least_peak: number;
    /** From the allocator of a GPU; null where not measured. */
    measured_peak_bytes: [number, number] | null;
    /** Largest |Δ| of results, gradients and, where there is an update, its new values against eager, with `delta` of the furthest output, which `brief` has in roundings; `is_same` is null where files of before do not say. Null where not measured. */
    difference: { results: number; gradients: number; updated?: number; delta: number; is_same: boolean | null; brief: string; said: string } | null;
    kernels: { unique: number; launches: number };
  };
  forward: Half;
  backward: Half;
  /** What an optimizer does behind the backward; null of a program without it. */
  update: Half | null;
  values: Record<string, Value>;
  clock: Clock;
  /** What a step takes and what would shorten it, in sentences, of which one leads and the head is those before the levers, and the findings that lead, each with the passes that mend it already; whether all that is left is too small to be the answer. */
  sentence: { said: string; lead: string; head: string; is_small: boolean; actions: { key: string; title: string; brief: string; worth: string; kind: TimeKind | ""; by: string[]; instead?: Finding }[] };
  /** What is slow, by the times of the tree, or by its ops where launches take longer: modules by their paths, or a line by its name; and the line that takes most in it. */
  slowest: { name: string; paths: string[]; said: string; line: string } | null;
  /** "measured on …", "predicted for …" or "modelled: …", of the values' times. */
  times: { before: string; after: string };
  memory: {
    before: Memory;
    after: Memory;
    /** What is saved for the backward: why, bytes before and after, the reason in a sentence. */
    reasons: [string, number, number, string][];
    /** The same by module, identical ones as one. */
    modules: [string, number, number][];
    /** Of each value that is saved with the passes: its reason. */
    why: Record<string, string>;
    at_peak: AtPeak;
  };
  kernels: KernelRecord[];
  aten: AtenRecord[];
  layers: LayerRow[];
  /** By pass, in the order of the pipeline. */
  decisions: Record<string, Decision[]>;
  /** What was computed and never used: no part of the program that the passes see. */
  unused: { provenance: string, ops: Unused[] };
  /** In the order in which they are told everywhere. */
  findings: Finding[];
  /** How many have too small a share of the step to be told, and which; "" for none. */
  below: string;
  /** Those of which `below` tells a count alone. */
  small: Finding[];
  /** By the detectors. */
  looked_for: string[];
  /** What "before" is everywhere: the captured trace, or a pinned configuration. */
  baseline: { is_pinned: boolean; call: string; config: Config };
  timing: Timing | null;
  notes: { kind: "guard" | "note"; text: string }[];
  environment: Record<string, string>;
  /** Of numbers that came before the rest of their payload: the tabs that wait for that. */
  late?: string[];
}

/** A configuration that was tried. */
interface BoardRow {
  /** The place of its capture among `captures`. */
  capture: number;
  /** What it is beside the default one, in a few words. */
  name: string;
  call: string;
  config: Config;
  /** Seconds since 1970. */
  tried_at: number;
  ops: number;
  saved_bytes: number;
  peak_bytes: number;
  /** The step on `device`. */
  step_us: number;
  kind: TimeKind;
  device: string;
  /** `step_us` beside that of the captured program of its capture, both of one kind; null where no two times of one kind are known. */
  ratio: number | null;
  ratio_kind: TimeKind | "";
  /** What was predicted before it was measured, or is now. */
  forecast_us: number | null;
  /** As timed last, in ms, and beside the captured program where that was timed too. */
  measured: (Interval & { where: string; ratio: number | null; ratio_how: string }) | null;
  is_captured: boolean;
  /** No other one of its capture is better in both time and memory. */
  is_best: boolean;
  is_shown: boolean;
}

interface BoardState {
  /** The place of the capture on show. */
  capture: number;
  captures: string[];
  /** Whose times the view shows. */
  device: string;
  /** Whether the step gathers parameters, which it can keep behind the forward or free. */
  gathers: boolean;
  rows: BoardRow[];
  /** What the last sweep came to; "" before one. */
  said: string;
  comparison: Comparison | null;
}

/** What tells two configurations apart; pairs are of the first and of the second. */
interface Comparison {
  sides: { capture: number; label: string; name: string; call: string; step_us: number; kind: TimeKind; measured: (Interval & { where: string }) | null; provenance: string; peak_bytes: number; saved_bytes: number; ops: number }[];
  /** Name and either value, as Python writes it. */
  options: [string, string, string][];
  modules: {
    path: string;
    module_type: string;
    count: number;
    ops: [number, number];
    us: [number, number];
    saved_bytes: [number, number];
    lines: { place: string; text: string; ops: [number, number]; us: [number, number] }[];
  }[];
  /** So many more modules differ, by less. */
  left_out: number;
  passes: { name: string; states: string[]; delta_us: (number | null)[]; saved_bytes: (number | null)[] }[];
}

interface Status {
  busy: "" | "passes" | "timing" | "kernels" | "take" | "findings" | "board";
  /** Of what can be cancelled, 0 to 1; of what nobody asked for it is there while nothing is busy. */
  progress: number | null;
  text: string;
  /** `at` is the pass whose control was used, the kernel that was to be inspected, "KEY CHOICE" of what was tried, or "". */
  error: { panel: Exclude<Status["busy"], "">; at: string; message: string } | null;
}

interface State {
  /** The fields of `payload` that became known since it came: those of the shown configuration, until another payload comes. */
  anew?: Partial<Payload>;
  /** Hexadecimal digits that no other view has: its still form is of the class `tf-still-KEY`. "" in a saved page. */
  key: string;
  payload: Payload;
  selected: string;
  status: Status;
  live: boolean;
  timeline: Timeline | null;
  /** What one pass alone changed; null where no pass is walked to, and in a saved page. */
  step: PassDiff | null;
  board: BoardState;
  /** The panel that is open first; "" for the first one. */
  tab: string;
}

interface Model {
  /** Of anywidget: what is known of the notebook depends on the front end. */
  widget_manager?: any;
  /** Only of a saved page: whether it has the payload for these changes. A kernel computes any, and a lost one none. */
  holds?(changes: Partial<Config>): boolean;
  get<K extends keyof State>(name: K): State[K];
  set<K extends keyof State>(name: K, value: State[K]): void;
  save_changes(): void;
  on(event: string, callback: (...args: any[]) => void): void;
  off(event: string, callback: (...args: any[]) => void): void;
  send(message: Message): void;
}

/**
 * Choices of passes, of what is pinned and of the clock are answered by a custom message { type: "answered", to }. Before the
 * trait `payload` has what another configuration comes to, its numbers come in a message { type: "numbers", numbers }: a
 * `Payload` with `late`, and without what takes longer; null takes them back. In another one follows what is on show of that,
 * and the trait once nobody clicks.
 */
type Message =
  /** Asks for nothing: sending it fails where the kernel is gone. */
  | { type: "hello" }
  | { type: "configure"; changes: Partial<Config> }
  | { type: "measure" }
  /** Each pass's own share of the time. */
  | { type: "ablate" }
  /** Time what a finding offers: the place among its trials. */
  | { type: "try"; finding: string; choice: number }
  | { type: "cancel" }
  /** Try many configurations, whose steps are predicted or modelled. */
  | { type: "sweep"; weights: number[]; budgets: (number | null)[]; passes: string[]; reshards?: (boolean | null)[] }
  /** Two rows of the board. */
  | { type: "compare"; pair: { capture: number; config: Config }[] }
  /** Show a configuration of another capture; `back` is what was shown. */
  | { type: "return"; capture: number; config: Config; back: { capture: number; config: Config } }
  /** Answered by the trait `step`. */
  | { type: "show_pass"; pass: string }
  /** What is shown, or another configuration. */
  | { type: "pin"; config?: Config }
  /** Whose times are shown: see `Clock.chosen`. */
  | { type: "clock"; device: string }
  | { type: "unpin" }
  /** Compile a kernel for its registers, shared memory and spills. */
  | { type: "inspect"; kernel: string }
  /** Answered by a custom message { type: "file", name, mime } with the bytes in its first buffer. */
  | { type: "take"; what: TakeAway };

type TakeAway = "html" | "python" | "chrome_trace" | "model_explorer" | "dot" | "svg";

/** What the reader has unfolded or typed, which a new payload does not undo. */
interface Open {
  passes: Set<string>;
  kernels: Set<string>;
  /** Control -> text that was typed and not taken over. */
  typed: Record<string, string>;
  /** The pass whose own work is shown, or "". */
  pass: string;
}

/** What every panel draws from: the same for all of them. */
interface View {
  payload: Payload;
  status: Status;
  /** The name of the selected value, or "". */
  selected: string;
  /** The pass whose own work is shown, or "". */
  pass: string;
  /** Names of the values that the search found; null where nothing is searched for. */
  matches: Set<string> | null;
  timeline: Timeline | null;
  step: PassDiff | null;
  board: BoardState;
  /** Whether there is a kernel behind the view. */
  live: boolean;
}

/** What a panel may ask for. */
interface Act {
  configure(changes: Partial<Config>): void;
  measure(): void;
  select(value: string): void;
  /** Show what this pass alone did; "" for none. */
  /** Ask for what this pass alone changed, as `step` of the view; nothing for "". */
  showAlone(name: string): void;
  showPass(name: string): void;
  /** Open a tab and move the keyboard there. */
  openTab(id: string): void;
  openKernel(name: string): void;
  openFinding(key: string): void;
  search(query: string): void;
  /** Any other message; `panel` is shown as waiting. */
  ask(panel: Exclude<Status["busy"], "">, message: Message): void;
  undo(): void;
  redo(): void;
  /** Of the choices that were made. */
  history: { readonly canUndo: boolean; readonly canRedo: boolean };
  live: boolean;
  holds(changes: Partial<Config>): boolean;
}

/** One tab. Its methods are called only while it is shown; what was missed meanwhile comes when it is opened. */
interface Panel {
  element: HTMLElement;
  /** The payload or the status changed. */
  draw(view: View): void;
  /** The selection or the search changed, after `draw`. */
  mark(view: View): void;
  destroy?(): void;
}

interface PanelSpec {
  id: string;
  label(payload: Payload): string;
  /** What stands beside it, in a place of its own. */
  count?(payload: Payload): number;
  make(act: Act, open: Open): Panel;
}
