// The build of the view as one file: modules and styles, minified and packed, behind a few lines that unpack them.
//
//     node build.mjs            write ../static/widget.js
//     node build.mjs --check    exit with 1 if that file holds another view than the sources
//
// A notebook gets the file once for each view, which is why it is packed, by Zopfli: it writes deflate that is 3.5 % shorter
// than zlib's. What is compared is the view itself, since another version may pack it to other bytes.

import { readFile, writeFile } from "node:fs/promises";
import { inflateRawSync } from "node:zlib";
import { build, transform } from "esbuild";

const TARGET = new URL("../static/widget.js", import.meta.url);

/** `loader: text` alone would leave the styles as they are written. @type {import("esbuild").Plugin} */
const styles = {
  name: "styles",
  setup(plugin) {
    plugin.onLoad({ filter: /\.css$/ }, async ({ path }) => {
      const { code } = await transform(await readFile(path, "utf8"), { loader: "css", minify: true, target: "chrome123", charset: "utf8" });
      return { contents: code, loader: "text" };
    });
  },
};

async function bundled() {
  const { outputFiles } = await build({
    entryPoints: ["main.js"],
    bundle: true,
    minify: true,
    format: "esm",
    target: "es2022",
    charset: "utf8",
    legalComments: "none",
    plugins: [styles],
    write: false,
  });
  return outputFiles[0].text;
}

/** 13 bits are two of these 91 letters, of which none ends a string or opens a tag: a thirteenth shorter than base64. */
const LETTERS = Array.from({ length: 94 }, (_, at) => String.fromCharCode(33 + at)).filter((one) => !'"<\\'.includes(one)).join("");

/** @param {Buffer} bytes */
function written(bytes) {
  let [text, bits, count] = ["", 0, 0];
  for (const byte of [...bytes, 0, 0]) {
    bits = (bits << 8) | byte;
    count += 8;
    if (count < 13) continue;
    count -= 13;
    const pair = bits >> count;
    text += LETTERS[Math.floor(pair / 91)] + LETTERS[pair % 91];
    bits &= (1 << count) - 1;
  }
  return text;
}

/** @param {string} text a module that exports `default` and `mountPage` */
async function packed(text) {
  const { default: zopfli } = await import("@gfx/zopfli");
  const bytes = await zopfli.deflateAsync(Buffer.from(text), { numiterations: 120 });
  return `// Made by widgets/js/build.mjs.
const packed = "${written(bytes)}";
const data = new Uint8Array(${bytes.length});
let at = 0, i = 0, b = 0, n = 0;
const digit = (c = packed.charCodeAt(i++)) => c - 33 - (c > 34) - (c > 60) - (c > 92);
while (at < data.length)
for (b = b << 13 | digit() * 91 + digit(), n += 13; n > 7; b &= (1 << n) - 1) data[at++] = b >> (n -= 8);
const text = await new Response(new Blob([data]).stream().pipeThrough(new DecompressionStream("deflate-raw"))).text();
const url = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
export const { default: view, mountPage } = await import(url);
export default view;
URL.revokeObjectURL(url);
`;
}

/** The view in a packed file. @param {string} file */
function unpacked(file) {
  const [, letters = ""] = file.match(/const packed = "([^"]*)"/) ?? [];
  const bytes = [];
  for (let from = 0, bits = 0, count = 0; from < letters.length; from += 2) {
    bits = (bits << 13) | (LETTERS.indexOf(letters[from]) * 91 + LETTERS.indexOf(letters[from + 1]));
    for (count += 13; count > 7; bits &= (1 << count) - 1) bytes.push(bits >> (count -= 8));
  }
  return inflateRawSync(Buffer.from(bytes)).toString();
}

const text = await bundled();
if (!process.argv.includes("--check")) await writeFile(TARGET, await packed(text));
else if (unpacked(await readFile(TARGET, "utf8")) !== text) {
  console.error("widgets/static/widget.js holds another view than the sources: run `npm run build` in widgets/js");
  process.exit(1);
}
