// The reader of what widgets/payload/pack.py packs: JSON values in which every part stands once, as text in base64.

/** @typedef {{ atoms: any[], shapes: string[][], nodes: number[][] }} Packed */

/**
 * The value that was packed. Equal parts are one object: nobody may edit them. The members of objects down to the depth `lazy`
 * are made when they are first asked for.
 * @param {Packed} packed @param {number} [lazy] @returns {any}
 */
export function unpack({ atoms, shapes, nodes }, lazy = 0) {
  /** @type {any[]} */
  const made = new Array(nodes.length);
  /** @param {number} at @param {number} depth @returns {any} */
  const part = (at, depth) => {
    if (at < atoms.length) return atoms[at];
    const [shape, ...parts] = nodes[at - atoms.length];
    if (shape >= 0 && depth < lazy) return lazily(shapes[shape], parts, depth);
    // Not by assignment: a value may be called __proto__.
    return (made[at - atoms.length] ??=
      shape < 0 ? parts.map((one) => part(one, depth + 1)) : Object.fromEntries(parts.map((one, i) => [shapes[shape][i], part(one, depth + 1)])));
  };
  /** @param {string[]} names @param {number[]} parts @param {number} depth */
  const lazily = (names, parts, depth) => {
    const object = {};
    for (const [i, name] of names.entries()) {
      const make = () => {
        const value = part(parts[i], depth + 1);
        Object.defineProperty(object, name, { value, enumerable: true });
        return value;
      };
      Object.defineProperty(object, name, { get: make, enumerable: true, configurable: true });
    }
    return object;
  };
  return part(atoms.length + nodes.length - 1, 0);
}

/** The bytes of base64 text. @param {string} text @returns {Uint8Array<ArrayBuffer>} */
export function bytesOf(text) {
  return Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
}

/** The value that `encode` in widgets/payload/pack.py made `text` of. @param {string} text @param {number} [lazy] as of `unpack` @returns {Promise<any>} */
export async function decode(text, lazy) {
  const unzipped = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return unpack(JSON.parse(await new Response(unzipped).text()), lazy);
}
