// The tabs, in the order in which they stand; the first is open when the view appears.

import { CodePanel } from "./code.js";
import code from "./code.css";
import details from "./details.css";
import { FindingsPanel } from "./findings.js";
import findings from "./findings.css";
import { GraphPanel } from "./graph.js";
import graph from "./graph.css";
import { KernelPanel } from "./kernels.js";
import layers from "./layers.css";
import { LayersPanel } from "./layers.js";
import main from "./main.css";
import passes from "./passes.css";
import style from "./style.css";
import { notesPanel, timingPanel } from "./tables.js";
import tables from "./tables.css";
import timeline from "./timeline.css";
import { TimelinePanel } from "./timeline.js";
import tree from "./tree.css";
import { TreePanel } from "./tree.js";
import verdict from "./verdict.css";

/** @type {PanelSpec[]} */
export const PANELS = [
  { id: "trace", label: () => "Trace", make: (act) => new TreePanel(act) },
  { id: "layers", label: () => "Layers", make: (act) => new LayersPanel(act) },
  { id: "graph", label: () => "Graph", make: (act) => new GraphPanel(act) },
  { id: "code", label: () => "Code", make: (act) => new CodePanel(act) },
  { id: "timeline", label: () => "Timeline", make: (act) => new TimelinePanel(act) },
  { id: "findings", label: ({ findings }) => `Findings ${findings.filter((one) => !one.fixed).length || ""}`, make: (act) => new FindingsPanel(act) },
  { id: "kernels", label: ({ kernels }) => `Kernels ${kernels.length}`, make: (act, open) => new KernelPanel(act, open) },
  { id: "timing", label: () => "Timing", make: timingPanel },
  { id: "notes", label: ({ notes }) => `Notes ${notes.length || ""}`, make: notesPanel },
];

/** Each panel's rules stand in a file of its own; the first has the colours and what is shared. */
export const STYLES = [style, main, verdict, passes, tree, layers, graph, code, timeline, details, tables, findings].join("\n");
