// The build of the view as one file: modules and styles, minified and packed, behind a few lines that unpack them.
//
//     node build.mjs            write ../static/widget.js
//     node build.mjs --check    exit with 1 if that file holds another view than the sources
//
// A notebook gets the file once for each view, which is why it is packed. What is compared is the view itself, since
// another version of zlib may pack it to other bytes.

import { readFile, writeFile } from "node:fs/promises";
import { deflateRawSync, inflateRawSync } from "node:zlib";
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

/** Four bytes are five of these letters, of which none ends a string or opens a tag: a sixteenth shorter than base64. */
const LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&_,;~()[]{}@%";

/** @param {Buffer} bytes */
function written(bytes) {
  const padded = Buffer.concat([bytes, Buffer.alloc((4 - (bytes.length % 4)) % 4)]);
  let text = "";
  for (let at = 0; at < padded.length; at += 4) {
    let letters = "";
    for (let left = padded.readUInt32BE(at), i = 0; i < 5; i += 1, left = Math.floor(left / 85)) letters = LETTERS[left % 85] + letters;
    text += letters;
  }
  return text;
}

/** @param {string} text a module that exports `default` and `mountPage` */
function packed(text) {
  const bytes = deflateRawSync(text, { level: 9, memLevel: 9 });
  return `// The view, packed by widgets/js/build.mjs from the modules beside it.
const letters = "${LETTERS}";
const packed = "${written(bytes)}";
const data = new DataView(new ArrayBuffer((packed.length / 5) * 4));
for (let at = 0; at < packed.length; at += 5) {
  let number = 0;
  for (let i = at; i < at + 5; i += 1) number = number * 85 + letters.indexOf(packed[i]);
  data.setUint32((at / 5) * 4, number);
}
const stream = new Blob([data.buffer.slice(0, ${bytes.length})]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
const url = URL.createObjectURL(new Blob([await new Response(stream).text()], { type: "text/javascript" }));
const view = await import(url);
URL.revokeObjectURL(url);
export default view.default;
export const mountPage = view.mountPage;
`;
}

/** The view in a packed file. @param {string} file */
function unpacked(file) {
  const [, letters = ""] = file.match(/const packed = "([^"]*)"/) ?? [];
  const bytes = Buffer.alloc((letters.length / 5) * 4);
  for (let at = 0; at < letters.length; at += 5) {
    const number = [...letters.slice(at, at + 5)].reduce((sum, letter) => sum * 85 + LETTERS.indexOf(letter), 0);
    bytes.writeUInt32BE(number, (at / 5) * 4);
  }
  return inflateRawSync(bytes).toString();
}

const text = await bundled();
if (!process.argv.includes("--check")) await writeFile(TARGET, packed(text));
else if (unpacked(await readFile(TARGET, "utf8")) !== text) {
  console.error("widgets/static/widget.js holds another view than the sources: run `npm run build` in widgets/js");
  process.exit(1);
}
