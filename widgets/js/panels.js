// The tabs, in the order in which they stand; the first is open when the view appears.

import { CodePanel } from "./code.js";
import layersStyle from "./layers.css";
import { LayersPanel } from "./layers.js";
import mainStyle from "./main.css";
import { kernelPanel, notesPanel, timingPanel } from "./tables.js";
import style from "./style.css";
import treeStyle from "./tree.css";
import { TreePanel } from "./tree.js";

/** @type {PanelSpec[]} */
export const PANELS = [
  { id: "trace", label: () => "Trace", make: (act) => new TreePanel(act) },
  { id: "code", label: () => "Code", make: (act) => new CodePanel(act) },
  { id: "layers", label: () => "Layers", make: (act) => new LayersPanel(act) },
  { id: "kernels", label: ({ kernels }) => `Kernels ${kernels.length}`, make: kernelPanel },
  { id: "timing", label: () => "Timing", make: timingPanel },
  { id: "notes", label: ({ notes }) => `Notes ${notes.length || ""}`, make: notesPanel },
];

/** Each panel's rules stand in a file of its own; the first has the colours and what is shared. */
export const STYLES = [style, mainStyle, treeStyle, layersStyle].join("\n");
