// The wire format, as widgets/payload.py documents it.

declare module "*.css" {
  const text: string;
  export default text;
}

interface Config {
  simplify: boolean;
  freeze: string[] | null;
  cat: boolean;
  decompose: boolean;
  remat: number | null;
  /** A fraction up to 1, or bytes. */
  memory_budget: number | null;
  remat_options: Record<string, string | boolean>;
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
  nbytes: number;
  phase: "forward" | "backward";
  module: string;
  source: string;
  reads: string[];
  uses: string[];
  twins: string[];
  saved: boolean;
  removed: boolean;
}

interface Decision {
  action: string;
  reason: string;
  nbytes: number;
  values: string[];
}

interface PassRecord {
  name: string;
  help: string;
  enabled: boolean;
  /** "on", "off", or "off: needs fuse": then its own switch changes nothing. */
  state: string;
  ops: [number, number] | null;
  saved_bytes: [number, number] | null;
  seconds: number | null;
  /** Those without a control of their own. */
  options: PassOption[];
  decisions: Decision[];
  error: string | null;
}

interface Interval {
  median: number;
  low: number;
  high: number;
}

interface TimingRow {
  label: string;
  baseline_ms: Interval | null;
  variant_ms: Interval | null;
  ratio: Interval;
  verdict: string;
}

interface Timing {
  provenance: string;
  stale: boolean;
  config: string;
  rows: TimingRow[];
  notes: string[];
}

interface KernelRecord {
  name: string;
  calls: number;
  ops: string[];
  nbytes_read: number;
  nbytes_written: number;
  time_us: number | null;
  provenance: string;
  blocks: "tuned" | "guess";
  source: string;
}

interface Payload {
  version: 1;
  config: Config;
  call: string;
  blocked: string | null;
  runs_triton: boolean;
  passes: PassRecord[];
  summary: {
    ops: [number, number];
    saved_bytes: [number, number];
    kernels: { unique: number; launches: number };
  };
  forward: Half;
  backward: Half;
  values: Record<string, Value>;
  kernels: KernelRecord[];
  timing: Timing | null;
  notes: { kind: "guard" | "note"; text: string }[];
  environment: Record<string, string>;
}

interface Status {
  busy: "" | "passes" | "timing";
  progress: number | null;
  text: string;
  /** `at` is the pass whose control was used, or "". */
  error: { panel: "passes" | "timing"; at: string; message: string } | null;
}

interface State {
  payload: Payload;
  selected: string;
  status: Status;
  live: boolean;
}

interface Model {
  /** Only of a saved page: whether it has the payload for these changes. A kernel computes any. */
  holds?(changes: Partial<Config>): boolean;
  get<K extends keyof State>(name: K): State[K];
  set<K extends keyof State>(name: K, value: State[K]): void;
  save_changes(): void;
  on(event: string, callback: (...args: any[]) => void): void;
  off(event: string, callback: (...args: any[]) => void): void;
  send(message: Message): void;
}

type Message = { type: "configure"; changes: Partial<Config> } | { type: "measure" };

/** What the reader has unfolded or typed, which a new payload does not undo. */
interface Open {
  passes: Set<string>;
  kernels: Set<string>;
  /** Control -> text that was typed and not taken over. */
  typed: Record<string, string>;
}

/** What a panel may ask for. */
interface Act {
  configure(changes: Partial<Config>): void;
  select(value: string): void;
  openKernel(name: string): void;
  /** Whether there is a kernel behind the view. */
  live: boolean;
  holds(changes: Partial<Config>): boolean;
}
