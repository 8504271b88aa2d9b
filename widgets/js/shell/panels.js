// The tabs in their order, of which the first is open when the view appears, and the style sheet of them all.

// Sheets stand together: packed beside each other they take 2 KiB less than each beside its panel.
import board from "../board/board.css";
import code from "../code/code.css";
import graph from "../graph/graph.css";
import layers from "../layers/layers.css";
import memory from "../memory/memory.css";
import passes from "../passes/passes.css";
import details from "../tables/details.css";
import findings from "../tables/findings.css";
import tables from "../tables/tables.css";
import timeline from "../timeline/timeline.css";
import trace from "../trace/trace.css";
import verdict from "../verdict/verdict.css";
import explorer from "./explorer.css";
import style from "./style.css";
import { BoardPanel } from "../board/panel.js";
import { CodePanel } from "../code/panel.js";
import { GraphPanel } from "../graph/panel.js";
import { KernelPanel } from "../kernels/panel.js";
import { LayersPanel } from "../layers/panel.js";
import { MemoryPanel } from "../memory/panel.js";
import { FindingsPanel } from "../tables/findings.js";
import { notesPanel, timingPanel } from "../tables/panel.js";
import { TimelinePanel } from "../timeline/panel.js";
import { TreePanel } from "../trace/panel.js";

/** @type {PanelSpec[]} */
export const PANELS = [
  { id: "trace", label: () => "Trace", make: (act) => new TreePanel(act) },
  { id: "layers", label: () => "Layers", make: (act) => new LayersPanel(act) },
  { id: "graph", label: () => "Graph", make: (act) => new GraphPanel(act) },
  { id: "code", label: () => "Code", make: (act) => new CodePanel(act) },
  { id: "timeline", label: () => "Timeline", make: (act) => new TimelinePanel(act) },
  { id: "memory", label: () => "Memory", make: (act) => new MemoryPanel(act) },
  { id: "findings", label: () => "Findings", count: ({ findings }) => findings.filter((one) => !one.is_mended).length, make: (act) => new FindingsPanel(act) },
  { id: "kernels", label: () => "Kernels", count: ({ summary }) => summary.kernels.unique, make: (act, open) => new KernelPanel(act, open) },
  { id: "timing", label: () => "Timing", make: timingPanel },
  { id: "board", label: () => "Board", make: (act) => new BoardPanel(act) },
  { id: "notes", label: () => "Notes", count: ({ notes }) => notes.length, make: notesPanel },
];

/** Each panel's rules stand in a file of its own; the first has the colours and what is shared. */
export const STYLES = [style, explorer, verdict, passes, trace, layers, graph, code, timeline, memory, details, tables, findings, board].join("\n");
