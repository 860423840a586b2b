// Bundle the explorer into one module, and the licences of what is in it into one text, beside the Python.
// `npm ci && npm run build` makes the committed files; a folder as argument takes them there instead.
import { build } from "esbuild";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const out = process.argv[2] ?? dirname(here);
const { metafile } = await build({
  absWorkingDir: here,
  entryPoints: ["src/index.js"],
  outfile: join(out, "explorer.js"),
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  charset: "utf8",
  loader: { ".css": "text" },
  legalComments: "none", // every licence is in the other file, whole
  metafile: true,
});

const packages = new Set(
  Object.keys(metafile.inputs)
    .map((path) => path.match(/^node_modules\/((?:@[^/]+\/)?[^/]+)\//)?.[1])
    .filter(Boolean),
);
const texts = new Map(); // many packages share one text
for (const name of [...packages].sort()) {
  const folder = join(here, "node_modules", name);
  const { version, license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
  const files = readdirSync(folder).filter((file) => /^(licen[cs]e|notice|copying)/i.test(file)).sort();
  if (!files.length) throw new Error(`${name} has no licence`);
  const text = files.map((file) => readFileSync(join(folder, file), "utf8").trim()).join("\n\n");
  texts.set(text, [...(texts.get(text) ?? []), `${name} ${version} (${license})`]);
}
const parts = [...texts].map(([text, names]) => `${names.join("\n")}\n\n${text}`);
const line = `\n\n${"-".repeat(80)}\n\n`;
writeFileSync(
  join(out, "explorer.LICENSES.txt"),
  `explorer.js contains these packages.${line}${parts.join(line)}\n`,
);
