// Values of the page's laws, for the test that compares them with SciPy: questions on stdin, answers on stdout.
import { build } from "esbuild";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [source, folder] = process.argv.slice(1);
const outfile = join(folder, "laws.mjs");
await build({ entryPoints: [source], outfile, bundle: true, format: "esm", logLevel: "error" });
const { law } = await import(pathToFileURL(outfile));
const questions = JSON.parse(readFileSync(0, "utf8"));
const answers = questions.map(({ name, params, x, q }) => {
  const { sf, isf, pdf } = law(name, params);
  return { sf: x.map(sf), pdf: x.map(pdf), isf: q.map(isf) };
});
process.stdout.write(JSON.stringify(answers));
