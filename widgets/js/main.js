// The two ways into the view: a notebook (anywidget) calls `render`, a saved page calls `mountPage`.

import { Explorer } from "./shell/explorer.js";
import { mountPage as mount } from "./shell/page.js";
import { STYLES } from "./shell/panels.js";

/** `mountPage` of shell/page.js, which knows no styles. @type {(render: any, held: string, host: HTMLElement) => Promise<void>} */
export const mountPage = (...given) => mount(...given, STYLES);

/** @param {{ model: Model, el: HTMLElement }} context @returns {() => void} the clean-up */
function render({ model, el }) {
  const explorer = new Explorer(model, el);
  const listeners = /** @type {[string, (...args: any[]) => void][]} */ ([
    ["change:payload", () => explorer.drawAll()],
    ["change:anew", () => (explorer.drawVerdict(), explorer.drawSide())],
    ["change:status", () => explorer.drawStatus()],
    ["change:timeline", () => explorer.drawAll()],
    ["change:step", () => explorer.drawSelection()],
    ["change:live", () => explorer.drawAll()],
    ["change:board", () => explorer.drawBoard()],
    ["comm_live_update", () => explorer.connection.check()],
    ["change:selected", () => explorer.drawSelected()],
    ["msg:custom", (message, buffers) => explorer.receive(message, buffers)],
  ]);
  for (const [event, listener] of listeners) model.on(event, listener);
  explorer.drawAll();
  return () => {
    for (const [event, listener] of listeners) model.off(event, listener);
    explorer.destroy();
  };
}

export default { render };
