// What widgets/pack.py packed: JSON values in which every part stands once, as text in base64.

/** @typedef {{ atoms: any[], shapes: string[][], nodes: number[][] }} Packed */

/** The value that was packed. Equal parts are one object: nobody may edit them. @param {Packed} packed @returns {any} */
export function unpack({ atoms, shapes, nodes }) {
  const made = [...atoms];
  for (const [shape, ...parts] of nodes) {
    const found = parts.map((part) => made[part]);
    // Not by assignment: a value may be called __proto__.
    made.push(shape < 0 ? found : Object.fromEntries(found.map((part, i) => [shapes[shape][i], part])));
  }
  return made[made.length - 1];
}

/** The bytes of base64 text. @param {string} text @returns {Uint8Array<ArrayBuffer>} */
export function bytesOf(text) {
  return Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
}

/** The value that `encode` in widgets/pack.py made `text` of. @param {string} text @returns {Promise<any>} */
export async function decode(text) {
  const unzipped = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return unpack(JSON.parse(await new Response(unzipped).text()));
}
