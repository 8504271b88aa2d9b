// The colours of the style sheet as a canvas needs them, when they change, and stripes in one of them.

const NAMES = { bg: "bg", raised: "raised", sunken: "sunken", line: "line", lineStrong: "line-strong", text: "text", soft: "soft", brand: "brand", good: "good", warn: "warn", bad: "bad", twin: "twin", wash: "brand-wash", on: "on-brand", string: "string", number: "number", heat: "graph-heat", onHue: "graph-on" };
const HUES = Array.from({ length: 8 }, (_, at) => [`k${at}`, `graph-${at}`]);
// How JupyterLab and VS Code say which theme is on.
const THEME = ["class", "data-jp-theme-light", "data-jp-theme-name", "data-vscode-theme-kind"];

/** @param {HTMLElement} inside @returns {Record<string, string>} */
export function colours(inside) {
  // A custom property's own text may be light-dark(…) or var(…); only a color is resolved.
  const probe = document.createElement("span");
  inside.append(probe);
  const style = getComputedStyle(probe);
  const resolve = (/** @type {string} */ name) => {
    probe.style.color = `var(--tf-${name})`;
    return style.color;
  };
  const found = Object.fromEntries([...Object.entries(NAMES), ...HUES].map(([name, property]) => [name, resolve(property)]));
  found.sans = style.fontFamily;
  probe.style.fontFamily = "var(--tf-mono)";
  found.mono = style.fontFamily;
  probe.remove();
  return found;
}

/** @param {() => void} changed @returns {() => void} stops it */
export function onTheme(changed) {
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const theme = new MutationObserver(changed);
  scheme.addEventListener("change", changed);
  // A theme's colours may come after its name: JupyterLab loads a style sheet.
  document.head.addEventListener("load", changed, true);
  for (const element of [document.documentElement, document.body]) theme.observe(element, { attributes: true, attributeFilter: THEME });
  return () => {
    scheme.removeEventListener("change", changed);
    document.head.removeEventListener("load", changed, true);
    theme.disconnect();
  };
}

/** Made once for each colour. @type {Map<string, CanvasPattern | string>} */
const hatches = new Map();

/** @param {CanvasRenderingContext2D} context @param {string} colour */
export function hatch(context, colour) {
  const made = hatches.get(colour) ?? striped(context, colour);
  hatches.set(colour, made);
  return made;
}

/** @param {CanvasRenderingContext2D} context @param {string} colour */
function striped(context, colour) {
  const tile = new OffscreenCanvas(6, 6);
  const stripes = /** @type {OffscreenCanvasRenderingContext2D} */ (tile.getContext("2d"));
  stripes.strokeStyle = colour;
  stripes.lineWidth = 1.5;
  for (const x of [-3, 3, 9]) {
    stripes.moveTo(x - 3, 6);
    stripes.lineTo(x + 3, 0);
  }
  stripes.stroke();
  return context.createPattern(tile, "repeat") ?? colour;
}
