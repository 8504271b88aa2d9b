// The tabs in their order, of which the first is open when the view appears, and the style sheet of them all.

import board from "../board/board.css";
import { BoardPanel } from "../board/panel.js";
import code from "../code/code.css";
import { CodePanel } from "../code/panel.js";
import graph from "../graph/graph.css";
import { GraphPanel } from "../graph/panel.js";
import { KernelPanel } from "../kernels/panel.js";
import layers from "../layers/layers.css";
import { LayersPanel } from "../layers/panel.js";
import memory from "../memory/memory.css";
import { MemoryPanel } from "../memory/panel.js";
import passes from "../passes/passes.css";
import details from "../tables/details.css";
import findings from "../tables/findings.css";
import { FindingsPanel } from "../tables/findings.js";
import { notesPanel, timingPanel } from "../tables/panel.js";
import tables from "../tables/tables.css";
import { TimelinePanel } from "../timeline/panel.js";
import timeline from "../timeline/timeline.css";
import { TreePanel } from "../trace/panel.js";
import trace from "../trace/trace.css";
import verdict from "../verdict/verdict.css";
import explorer from "./explorer.css";
import style from "./style.css";

/** @type {PanelSpec[]} */
export const PANELS = [
  { id: "trace", label: () => "Trace", make: (act) => new TreePanel(act) },
  { id: "layers", label: () => "Layers", make: (act) => new LayersPanel(act) },
  { id: "graph", label: () => "Graph", make: (act) => new GraphPanel(act) },
  { id: "code", label: () => "Code", make: (act) => new CodePanel(act) },
  { id: "timeline", label: () => "Timeline", make: (act) => new TimelinePanel(act) },
  { id: "memory", label: () => "Memory", make: (act) => new MemoryPanel(act) },
  { id: "findings", label: () => "Findings", count: ({ findings }) => findings.filter((one) => !one.is_mended).length, make: (act) => new FindingsPanel(act) },
  { id: "kernels", label: () => "Kernels", count: ({ kernels }) => kernels.length, make: (act, open) => new KernelPanel(act, open) },
  { id: "timing", label: () => "Timing", make: timingPanel },
  { id: "board", label: () => "Board", make: (act) => new BoardPanel(act) },
  { id: "notes", label: () => "Notes", count: ({ notes }) => notes.length, make: notesPanel },
];

/** Each panel's rules stand in a file of its own; the first has the colours and what is shared. */
export const STYLES = [style, explorer, verdict, passes, trace, layers, graph, code, timeline, memory, details, tables, findings, board].join("\n");
