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

/** @param {string} text a module that exports `default` and `mountPage` */
const packed = (text) => `// The view, packed by widgets/js/build.mjs from the modules beside it.
const packed = "${deflateRawSync(text, { level: 9 }).toString("base64")}";
const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
const url = URL.createObjectURL(new Blob([await new Response(stream).text()], { type: "text/javascript" }));
const view = await import(url);
URL.revokeObjectURL(url);
export default view.default;
export const mountPage = view.mountPage;
`;

/** @param {string} file */
const unpacked = (file) => inflateRawSync(Buffer.from(file.match(/"([A-Za-z0-9+/=]+)"/)?.[1] ?? "", "base64")).toString();

const text = await bundled();
if (!process.argv.includes("--check")) await writeFile(TARGET, packed(text));
else if (unpacked(await readFile(TARGET, "utf8")) !== text) {
  console.error("widgets/static/widget.js holds another view than the sources: run `npm run build` in widgets/js");
  process.exit(1);
}
