// The tabs, in the order in which they stand; the first is open when the view appears.

import { CodePanel } from "./code.js";
import code from "./code.css";
import details from "./details.css";
import { FindingsPanel, openFindings } from "./findings.js";
import findings from "./findings.css";
import { KernelPanel } from "./kernels.js";
import passes from "./passes.css";
import style from "./style.css";
import { notesPanel, timingPanel } from "./tables.js";
import tables from "./tables.css";
import verdict from "./verdict.css";

/** @type {PanelSpec[]} */
export const PANELS = [
  { id: "code", label: () => "Code", make: (act) => new CodePanel(act) },
  { id: "findings", label: (payload) => `Findings ${openFindings(payload) || ""}`, make: (act) => new FindingsPanel(act) },
  { id: "kernels", label: ({ kernels }) => `Kernels ${kernels.length}`, make: (act, open) => new KernelPanel(act, open) },
  { id: "timing", label: () => "Timing", make: timingPanel },
  { id: "notes", label: ({ notes }) => `Notes ${notes.length || ""}`, make: notesPanel },
];

/** Each panel's rules stand in a file of its own; the first has the colours and what is shared. */
export const STYLES = [style, verdict, passes, code, details, tables, findings].join("\n");
