// The tabs, in the order in which they stand; the first is open when the view appears.

import { CodePanel } from "./code.js";
import { GraphPanel } from "./graph.js";
import graphStyle from "./graph.css";
import { kernelPanel, notesPanel, timingPanel } from "./tables.js";
import style from "./style.css";

/** @type {PanelSpec[]} */
export const PANELS = [
  { id: "code", label: () => "Code", make: (act) => new CodePanel(act) },
  { id: "graph", label: () => "Graph", make: (act) => new GraphPanel(act) },
  { id: "kernels", label: ({ kernels }) => `Kernels ${kernels.length}`, make: kernelPanel },
  { id: "timing", label: () => "Timing", make: timingPanel },
  { id: "notes", label: ({ notes }) => `Notes ${notes.length || ""}`, make: notesPanel },
];

/** Each panel's rules stand in a file of its own; the first has the colours and what is shared. */
export const STYLES = [style, graphStyle].join("\n");
