// One file of the view: modules and styles, both minified. `loader: text` alone would leave the styles as they are written.

import { readFile } from "node:fs/promises";
import { build, transform } from "esbuild";

/** @type {import("esbuild").Plugin} */
const styles = {
  name: "styles",
  setup(plugin) {
    plugin.onLoad({ filter: /\.css$/ }, async ({ path }) => {
      const { code } = await transform(await readFile(path, "utf8"), { loader: "css", minify: true, target: "chrome123", charset: "utf8" });
      return { contents: code, loader: "text" };
    });
  },
};

await build({
  entryPoints: ["main.js"],
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  charset: "utf8",
  legalComments: "none",
  plugins: [styles],
  outfile: "../static/widget.js",
});
