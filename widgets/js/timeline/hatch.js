// Stripes for a canvas, on what is below them.

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
