// The page: a view (run, step, layer, ratio, laws, …), controls that change it, figures and tables that show it.
import { load } from "./data.js";
import { FIGURES, num, quality, shade, stripOf } from "./figures.js";
import { law as lawOf } from "./laws.js";
import css from "./style.css";

/** Make an element. Names that begin with "on" are listeners, others attributes; false leaves one out. */
function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value !== undefined) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const SECTIONS = {
  overview: ["Overview", "Click a step or a layer to look at it; drag to look at some steps only. Arrow keys move, too."],
  step: ["Step", ""],
  thresholds: ["Thresholds", "Each rule as counted on the gradients. The band holds 95 % of what chance does to a perfect rule, with the design effect where it is known."],
  ranks: ["Ranks", ""],
};
const RULES = ["exact", "redsync", "gaussiank", "sidco-e"];
const FEWEST = 10;

const key = (s) => `${s.run}/${s.kind}/${s.rank}`;

/** Turn the names of a view into places, and what does not exist into what does. */
function resolve(about, view) {
  const series = about.series.find((s) => key(s) === view.run) ?? about.series[0];
  const beside = about.series.find((s) => key(s) === view.beside && s !== series);
  const named = series.layers.findIndex((l) => l.name === view.layer);
  const layer = Math.max(named, 0);
  const last = series.steps.length - 1;
  const place = (step, otherwise) => (Number.isFinite(step) ? series.nearest(step) : otherwise);
  const step = place(view.step, last);
  let [from, to] = [place(view.from, 0), place(view.to, last)];
  if (from > to) [from, to] = [to, from];
  const wanted = view.ratio > 0 ? view.ratio : 0.001;
  const far = about.ratios.map((r) => Math.abs(Math.log(r / wanted)));
  const ratio = far.indexOf(Math.min(...far));
  const laws = (view.laws ?? Object.keys(series.fits)).filter((n) => about.laws.some((l) => l.name === n));
  let rules = (view.rules ?? RULES).filter((n) => series.rules.includes(n));
  if (!view.rules && !rules.length) rules = series.rules.slice(0, 4);
  const quantity = /^rule:/.test(view.quantity) ? (series.rules.includes(view.quantity.slice(5)) ? view.quantity : "norm") : ["norm", "xi", "zeros", "alarm"].includes(view.quantity) ? view.quantity : "norm";
  const shared = about.agreement.find((a) => a.run === series.run && a.kind === series.kind);
  const ctx = { about, series, beside, layer, step, from, to, ratio, laws, rules, quantity, shared };
  if (beside) {
    ctx.besideStep = beside.nearest(series.steps[step]);
    ctx.besideLayer = Math.max(beside.layers.findIndex((l) => l.name === series.layers[layer].name), 0);
  }
  return ctx;
}

/** The names of a view, as the address, Python and `resolve` take them. */
function names(ctx) {
  const { series, about, from, to } = ctx;
  const last = series.steps.length - 1;
  return {
    run: key(series),
    step: series.steps[ctx.step],
    layer: series.layers[ctx.layer].name,
    ratio: about.ratios[ctx.ratio],
    laws: ctx.laws,
    rules: ctx.rules,
    beside: ctx.beside ? key(ctx.beside) : "",
    quantity: ctx.quantity,
    from: from > 0 ? series.steps[from] : null,
    to: to < last ? series.steps[to] : null,
  };
}

/** What of two contexts differs, by the names that figures use. */
function changes(before, after) {
  if (!before) return null;
  const same = {
    run: before.series === after.series,
    beside: before.beside === after.beside,
    layer: before.layer === after.layer,
    step: before.step === after.step,
    ratio: before.ratio === after.ratio,
    range: before.from === after.from && before.to === after.to,
    quantity: before.quantity === after.quantity,
    stripRatio: before.ratio === after.ratio || !after.quantity.startsWith("rule:"),
    laws: String(before.laws) === String(after.laws),
    rules: String(before.rules) === String(after.rules),
  };
  return Object.keys(same).filter((name) => !same[name]);
}

// ---------------------------------------------------------------- tables

const percent = (x) => `${num(100 * x)} %`;

function facts(ctx) {
  const columns = [[ctx.series, ctx.step, ctx.layer]];
  if (ctx.beside) columns.push([ctx.beside, ctx.besideStep, ctx.besideLayer]);
  const of = columns.map(([series, step, layer]) => ({ series, step, layer, ...series.facts(step, layer) }));
  const row = (name, value) => [name, ...of.map(value)];
  return {
    head: ["", ...of.map((f) => `${f.series.name}, step ${num(f.series.steps[f.step])}, ${f.series.layers[f.layer].name}`)],
    rows: [
      row("elements", (f) => num(f.numel)),
      row("zeros", (f) => percent(f.zeroShare)),
      row("NaN and infinite", (f) => num(f.nonfinite)),
      row("norm", (f) => num(f.norm)),
      row("largest |g|", (f) => (f.count ? num(f.largest) : "–")),
      row("ξ of double genpareto", (f) => num(f.xi)),
      row("loss", (f) => num(f.series.losses[f.step])),
    ],
  };
}

function laws(ctx) {
  const rows = ctx.laws.map((name) => {
    const look = ctx.about.laws.find((l) => l.name === name);
    const fit = ctx.series.fit(ctx.step, ctx.layer, name);
    if (!fit) return [swatch(look), look.label, ctx.view.fit ? "being fitted …" : "not fitted for this run", "–", ""];
    const parameters = look.parameters.map(({ name: p, symbol }) => {
      const known = Number.isFinite(fit.stderr[p]);
      return `${symbol} ${num(fit.params[p])}${known ? ` ± ${num(fit.stderr[p])}` : ""}`;
    });
    const off = Number.isFinite(fit.tailError) ? `${num(fit.tailError)} (a factor of ${num(Math.exp(fit.tailError))})` : "–";
    return [swatch(look), look.label, parameters.join(", "), off, fit.flags || "–"];
  });
  return { head: ["line", "law", "parameters ± standard error", "tail error", "doubt"], rows };
}

function rules(ctx) {
  const { series, beside, step, layer, ratio } = ctx;
  const rows = ctx.rules.map((name) => {
    const r = series.rule(step, layer, name, ratio);
    const row = [swatch(ctx.about.rules.find((l) => l.name === name)), name, quality(r.quality), num(r.kept), r.kept ? num(r.threshold) : "beyond the largest"];
    if (beside) row.push(quality(beside.rule(ctx.besideStep, ctx.besideLayer, name, ratio).quality));
    return row;
  });
  return { head: ["line", "rule", "k̂/k", "k̂", "threshold η", ...(beside ? [`k̂/k, ${beside.name}`] : [])], rows };
}

/** Where each rule is farthest from k, and how often it is outside the noise floor. */
function worst(ctx) {
  const { series, ratio, from, to, about } = ctx;
  const [layers, ratios, rules] = [series.layers.length, about.ratios.length, series.rules.length];
  const judged = []; // cells, with the floor as bounds of log₂ k̂/k: once, and not for each rule
  for (let cell = from * layers; cell < (to + 1) * layers; cell++) {
    const layer = cell % layers;
    if (series.layers[layer].k[ratio] < FEWEST) continue;
    const { half } = series.floor((cell - layer) / layers, layer, ratio);
    judged.push([cell, Math.log2(Math.max(1 - half, 0)), Math.log2(1 + half)]);
  }
  const rows = series.rules.map((name, r) => {
    let [outside, counted, far, where] = [0, 0, -1, 0];
    for (const [cell, low, high] of judged) {
      const off = series.arrays.off[(cell * rules + r) * ratios + ratio];
      if (Number.isNaN(off)) continue;
      counted++;
      if (off < low || off > high) outside++;
      if (Math.abs(off) > far) [far, where] = [Math.abs(off), cell];
    }
    if (!counted) return [name, "–", "–", "–", ""];
    const off = series.arrays.off[(where * rules + r) * ratios + ratio];
    const place = { step: series.steps[Math.floor(where / layers)], layer: series.layers[where % layers].name };
    const show = h("button", { type: "button", onclick: () => ctx.go({ ...place, rules: [...new Set([...ctx.now().rules, name])], quantity: `rule:${name}` }) }, "Show");
    const text = far > 0 ? `step ${num(place.step)}, ${place.layer}` : "nowhere";
    return [name, `${num(outside)} of ${num(counted)}`, quality(2 ** off), text, far > 0 ? show : ""];
  });
  return { head: ["rule", "outside the floor", "farthest k̂/k", "where", ""], rows };
}

/** The two neighbouring steps between which the whole gradient, and a layer, change most. */
function moves({ series, from, to }) {
  const most = (layers, value) => {
    let best = null;
    for (const layer of layers)
      for (let step = from + 1; step <= to; step++) {
        const change = value(step, layer) - value(step - 1, layer);
        if (Number.isFinite(change) && (!best || Math.abs(change) > Math.abs(best.change))) best = { step, layer, change };
      }
    return best;
  };
  const whole = most([0], (step) => series.logSize(step, 0, Math.max(0.01 * series.facts(step, 0).finite, 1)));
  const layer = most(series.layers.map((_, i) => i).slice(1), (step, i) => Math.log2(series.facts(step, i).norm));
  return { whole, layer };
}

function changed(ctx) {
  const { whole, layer } = moves(ctx);
  const { series } = ctx;
  const between = (b) => `from step ${num(series.steps[b.step - 1])} to ${num(series.steps[b.step])}`;
  const show = (b) => h("button", { type: "button", onclick: () => ctx.go({ step: series.steps[b.step], layer: series.layers[b.layer].name }) }, "Show");
  const parts = [];
  if (whole) parts.push(h("p", {}, `Largest change of the whole gradient: its 1 % quantile × ${num(2 ** whole.change)} ${between(whole)}. `, show(whole)));
  if (layer) parts.push(h("p", {}, `Largest change of a layer: the norm of ${series.layers[layer.layer].name} × ${num(2 ** layer.change)} ${between(layer)}. `, show(layer)));
  return parts.length ? parts : [h("p", {}, "One step: nothing to compare it with.")];
}

/** The numbers of a figure over the steps, or of a curve. */
function numbers(id, ctx) {
  const { series, layer, ratio, from, to } = ctx;
  const steps = series.steps.map((_, i) => i).slice(from, to + 1);
  if (id === "survival" || id === "density" || id === "qq") {
    const curve = series.curve(ctx.step, layer);
    const { count, zeroShare } = series.facts(ctx.step, layer);
    const fits = ctx.laws.map((n) => ctx.quantiles(n));
    return {
      head: ["rank", "share of elements", "magnitude", ...ctx.laws.map((n) => `expected by ${n}`)],
      rows: curve.map((p) => [num(Math.round(p.rank)), num(p.share), num(p.size), ...fits.map((f) => (f ? num(f.isf((p.rank - 0.5) / count)) : "–"))]),
      note: zeroShare,
    };
  }
  if (id === "thresholds") return { head: ["step", ...ctx.rules, "floor ±"], rows: steps.map((s) => [num(series.steps[s]), ...ctx.rules.map((r) => quality(2 ** series.off(s, layer, r, ratio))), num(series.floor(s, layer, ratio).half)]) };
  if (id === "strips") {
    const { value, title } = stripOf(ctx);
    return { head: [`${title}: layer`, ...steps.map((s) => `step ${num(series.steps[s])}`)], rows: series.layers.map((l, i) => [l.name, ...steps.map((s) => num(value(s, i)))]) };
  }
  if (id === "magnitudes") {
    const at = (s, share) => num(2 ** series.logSize(s, layer, Math.max(share * series.facts(s, layer).finite, 1)));
    return { head: ["step", "largest", "at 0.001", "at 0.01", "at 0.1"], rows: steps.map((s) => [num(series.steps[s]), num(series.facts(s, layer).largest), at(s, 0.001), at(s, 0.01), at(s, 0.1)]) };
  }
  if (id === "loss") return { head: ["step", "loss"], rows: steps.map((s) => [num(series.steps[s]), num(series.losses[s])]) };
  if (!ctx.shared) return { head: [], rows: [] };
  const [layers, ratios] = [series.layers.length, ctx.about.ratios.length];
  const of = id === "union" ? ["union"] : ["cosine", "signs", "overlap"];
  return { head: ["step", ...of], rows: ctx.shared.steps.map((s, i) => [num(s), ...of.map((n) => num(ctx.shared.values[n][(i * layers + layer) * ratios + ratio]))]) };
}

function swatch(look) {
  const span = h("span", { class: "gs-swatch", "aria-hidden": "true" });
  span.innerHTML = `<svg width="34" height="12"><line x1="1" x2="33" y1="6" y2="6" stroke="${shade(look.color)}" stroke-width="2.4" stroke-dasharray="${look.dash}"/></svg>`;
  return span;
}

const textOf = (cell) => (cell instanceof Node ? "" : String(cell));
/** Comma-separated values of a table: plain numbers, quoted texts. */
export function csv({ head, rows }) {
  const plain = (cell) => {
    const text = textOf(cell).replaceAll("−", "-").replace(/^(-?[\d,]+)$/, (n) => n.replaceAll(",", ""));
    const power = text.match(/^(-?[\d.]*)·?10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)$/);
    const shown = power ? `${power[1] || 1}e${[...power[2]].map((c) => "⁰¹²³⁴⁵⁶⁷⁸⁹".indexOf(c)).map((d) => (d < 0 ? "-" : d)).join("")}` : text;
    return /[",\n]/.test(shown) ? `"${shown.replaceAll('"', '""')}"` : shown;
  };
  return [head, ...rows].map((row) => row.filter((cell) => !(cell instanceof Node)).map(plain).join(",")).join("\n");
}

function table({ head, rows }, caption) {
  return h(
    "div",
    { class: "gs-scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, head.map((t) => h("th", { scope: "col" }, t)))), h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, i) => (i === 0 && !(cell instanceof Node) ? h("th", { scope: "row" }, cell) : h("td", {}, cell))))))),
  );
}

// ---------------------------------------------------------------- export

/** A drawn figure as a file of its own: colours of the page instead of its variables. */
function standalone(figure) {
  const copy = figure.cloneNode(true);
  const style = getComputedStyle(figure);
  const back = style.getPropertyValue("--gs-back").trim() || "white";
  const box = [figure.getAttribute("width"), figure.getAttribute("height")];
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("style", `color: ${style.color}; overflow: visible`);
  const page = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const [name, value] of Object.entries({ width: box[0], height: box[1], fill: back })) page.setAttribute(name, value);
  copy.prepend(page);
  const lift = parseFloat(style.getPropertyValue("--gs-lift")) / 100;
  const mixed = (_, hex) => `#${hex.match(/../g).map((c) => Math.round(255 * lift + (1 - lift) * parseInt(c, 16)).toString(16).padStart(2, "0")).join("")}`;
  return new XMLSerializer().serializeToString(copy).replaceAll("var(--gs-back)", back).replace(/color-mix\(in srgb, #(\w{6}), white var\(--gs-lift\)\)/g, mixed);
}

function save(name, url) {
  h("a", { download: name, href: url }).click();
}

async function saveFigure(figure, name, type) {
  const text = standalone(figure);
  const url = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  if (type === "svg") return save(`${name}.svg`, url);
  const image = new Image();
  image.src = url;
  await image.decode();
  const canvas = h("canvas", { width: 2 * image.width, height: 2 * image.height });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return save(`${name}.png`, canvas.toDataURL("image/png"));
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea", {});
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy"); // where the page may not use the clipboard by itself
    area.remove();
  }
}

// ---------------------------------------------------------------- the page

/** Show a payload in an element. `view` is where the view is kept: {read(), write(names), watch(listener), fit?}. */
export async function mount(root, text, view) {
  const about = await load(text);
  root.classList.add("gs-explorer");
  if (!document.getElementById("gs-style")) document.head.append(h("style", { id: "gs-style" }, css));
  let ctx = null;
  const status = h("p", { class: "gs-live", "aria-live": "polite" });
  const say = (words) => (status.textContent = words);

  const set = (changed) => {
    update({ ...names(ctx), ...changed });
    view.write(names(ctx));
  };
  let waiting = null;
  const soon = (changed) => {
    // a slider says more than a screen can show
    if (!waiting) requestAnimationFrame(() => ([changed, waiting] = [waiting, null], set(changed)));
    waiting = { ...waiting, ...changed };
  };

  // controls
  const options = (list) => list.map(([value, label]) => h("option", { value }, label));
  const runs = about.series.map((s) => [key(s), s.name]);
  const run = h("select", { name: "run", onchange: () => set({ run: run.value, beside: "" }) }, options(runs));
  const beside = h("select", { name: "beside", onchange: () => set({ beside: beside.value }) });
  const layer = h("select", { name: "layer", onchange: () => set({ layer: layer.value }) });
  const step = h("input", { type: "range", name: "step", min: 0, oninput: () => soon({ step: ctx.series.steps[step.value] }) });
  const ratio = h("input", { type: "range", name: "ratio", min: 0, max: about.ratios.length - 1, oninput: () => soon({ ratio: about.ratios[ratio.value] }) });
  const stepShown = h("output", {});
  const ratioShown = h("output", {});
  const boxes = (list, name) =>
    list.map((look) => {
      const box = h("input", { type: "checkbox", value: look.name, onchange: () => set({ [name]: list.map((l) => l.name).filter((n) => (n === look.name ? box.checked : ctx[name].includes(n))) }) });
      return { box, name: look.name, label: h("label", {}, box, swatch(look), look.label ?? look.name) };
    });
  const lawBoxes = boxes(about.laws, "laws");
  const ruleBoxes = boxes(about.rules, "rules");
  const quantity = h("select", { name: "quantity", onchange: () => set({ quantity: quantity.value }) });
  const whole = h("button", { type: "button", onclick: () => set({ from: null, to: null }) }, "All steps");
  const field = (label, ...inputs) => h("label", { class: "gs-field" }, h("span", {}, label), ...inputs);
  const controls = h(
    "form",
    { class: "gs-controls", "aria-label": "What is shown", onsubmit: (e) => e.preventDefault() },
    h("div", { class: "gs-row" }, field("Run", run), runs.length > 1 && field("Beside it", beside), field("Layer", layer), field("Step", step, stepShown), field("Ratio k/d", ratio, ratioShown)),
    h("div", { class: "gs-row" }, h("fieldset", {}, h("legend", {}, "Laws"), lawBoxes.map((b) => b.label)), h("fieldset", {}, h("legend", {}, "Rules"), ruleBoxes.map((b) => b.label))),
  );

  // panels
  const sections = {};
  const panels = FIGURES.map((figure) => {
    const stage = h("div", { class: "gs-stage" });
    const details = h("details", { class: "gs-numbers", ontoggle: () => fill() }, h("summary", {}, "Numbers"));
    const file = () => `${ctx.series.run}-${figure.id}-${names(ctx).step}`;
    const tool = (label, title, act) => h("button", { type: "button", title, onclick: act }, label);
    const tools = h(
      "div",
      { class: "gs-tools" },
      tool("SVG", `Save ${figure.title} as SVG`, () => panel.svg && saveFigure(panel.svg, file(), "svg")),
      tool("PNG", `Save ${figure.title} as PNG`, () => panel.svg && saveFigure(panel.svg, file(), "png")),
      tool("CSV", `Copy the numbers of ${figure.title}`, async () => (await copy(csv(numbers(figure.id, ctx))), say(`The numbers of ${figure.title} are copied.`))),
    );
    const panel = { ...figure, stage, details, svg: null, near: false, stale: false };
    stage.style.minHeight = `${figure.height}px`; // until it is drawn, so that what is below stays there
    panel.node = h("figure", { id: `gs-${figure.id}`, class: figure.wide ? "gs-wide" : "", tabindex: "0", "aria-label": figure.title }, h("figcaption", {}, h("h3", {}, figure.title), tools), figure.id === "strips" && field("Colour", quantity), stage, details);
    if (figure.steps) pointAt(panel);
    const fill = () => {
      details.querySelector(".gs-scroll")?.remove();
      if (details.open) details.append(table(numbers(figure.id, ctx), figure.title));
    };
    panel.show = () => {
      panel.stale = !panel.near;
      if (panel.stale) return;
      panel.width = stage.clientWidth;
      const drawn = figure.draw(ctx, Math.max(panel.width || root.clientWidth - 24, 240));
      panel.svg = drawn instanceof SVGElement ? drawn : null;
      if (panel.svg) panel.svg.setAttribute("role", "img"), panel.svg.setAttribute("aria-label", `${figure.title}: its numbers are in the table below`);
      stage.replaceChildren(drawn);
      stage.style.minHeight = "";
      panel.node.hidden = drawn === "";
      fill();
    };
    return panel;
  });
  const block = (id, make, uses, caption) => {
    const node = h("div", { id: `gs-${id}` });
    return {
      node,
      uses,
      show() {
        const made = make(ctx);
        const button = h("button", { type: "button", class: "gs-copy", onclick: async () => (await copy(csv(made)), say(`${caption} is copied.`)) }, "Copy CSV");
        node.replaceChildren(...(Array.isArray(made) ? made : [table(made, caption), button]));
      },
    };
  };
  const blocks = {
    changed: block("changed", changed, ["run", "range"], ""),
    facts: block("facts", facts, ["run", "beside", "layer", "step"], "This gradient"),
    laws: block("laws", laws, ["run", "layer", "step", "laws"], "Laws fitted to it; tail error: largest |ln of the law's threshold ÷ the exact one|"),
    rules: block("rules", rules, ["run", "beside", "layer", "step", "ratio", "rules"], "What the rules keep of it"),
    worst: block("worst", worst, ["run", "range", "ratio"], `Which rule fails where: all layers with k of at least ${FEWEST}, steps in view`),
  };
  for (const [id, [title, hint]] of Object.entries(SECTIONS)) {
    const own = panels.filter((p) => p.section === id).map((p) => p.node);
    const more = { overview: [blocks.changed], step: [blocks.facts, blocks.laws, blocks.rules], thresholds: [blocks.worst], ranks: [] }[id];
    sections[id] = h("section", { "aria-label": title, class: `gs-${id}` }, h("h2", {}, title), id === "overview" && h("div", { class: "gs-hint" }, hint, " ", whole), id !== "overview" && hint && h("p", { class: "gs-hint" }, hint), h("div", { class: "gs-figures" }, own), h("div", { class: "gs-tables" }, more.map((b) => b.node)));
  }
  const notes = about.notes.map((note) => h("p", { class: "gs-note", role: "note" }, note));
  root.replaceChildren(...notes, controls, status, sections.overview, sections.step, sections.thresholds, sections.ranks);
  const everything = [...panels, ...Object.values(blocks)];

  /** Let a figure over the steps be pointed at: click, drag, and arrow keys where it has the focus. */
  function pointAt(panel) {
    let began = null;
    const band = h("div", { class: "gs-band", hidden: true });
    const place = (event) => {
      const x = panel.svg.scale("x");
      const box = panel.svg.getBoundingClientRect();
      const scale = box.width / panel.svg.getAttribute("width");
      const clamp = (v, low, high) => Math.min(Math.max(Math.round(v), low), high);
      const found = { step: clamp(x.invert((event.clientX - box.left) / scale), ctx.from, ctx.to), x: event.clientX };
      if (panel.layers) {
        const y = panel.svg.scale("y").invert((event.clientY - box.top) / scale);
        found.layer = clamp(y, 0, ctx.series.layers.length - 1);
      }
      return found;
    };
    panel.stage.addEventListener("pointerdown", (event) => {
      if (!panel.svg?.scale || event.button) return;
      began = place(event);
      panel.stage.setPointerCapture(event.pointerId);
      panel.stage.append(band);
    });
    panel.stage.addEventListener("pointermove", (event) => {
      if (!panel.svg?.scale) return;
      const at = place(event);
      if (panel.layers) {
        const { value, words } = stripOf(ctx);
        panel.stage.title = `step ${num(ctx.series.steps[at.step])}, ${ctx.series.layers[at.layer].name}: ${words(value(at.step, at.layer))}`;
      } else panel.stage.title = `step ${num(ctx.series.steps[at.step])}`;
      if (!began) return;
      const left = panel.stage.getBoundingClientRect().left;
      band.hidden = Math.abs(at.x - began.x) < 6;
      band.style.left = `${Math.min(at.x, began.x) - left}px`;
      band.style.width = `${Math.abs(at.x - began.x)}px`;
    });
    const end = (event) => {
      if (!began) return;
      const [first, last] = [began, place(event)];
      began = null;
      band.remove();
      if (event.type === "pointercancel") return;
      const { steps, layers } = ctx.series;
      if (Math.abs(last.x - first.x) < 6) set({ step: steps[last.step], ...(panel.layers && { layer: layers[last.layer].name }) });
      else if (first.step !== last.step) set({ from: steps[Math.min(first.step, last.step)], to: steps[Math.max(first.step, last.step)] });
    };
    panel.stage.addEventListener("pointerup", end);
    panel.stage.addEventListener("pointercancel", end);
    panel.node.addEventListener("keydown", (event) => {
      if (event.target !== panel.node) return;
      const [dx, dy] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] ?? [0, 0];
      if (!dx && !(dy && panel.layers)) return;
      event.preventDefault();
      const clamp = (v, n) => Math.min(Math.max(v, 0), n - 1);
      set({ step: ctx.series.steps[clamp(ctx.step + dx, ctx.series.steps.length)], layer: ctx.series.layers[clamp(ctx.layer + dy, ctx.series.layers.length)].name });
    });
  }

  function update(wanted) {
    const before = ctx;
    ctx = resolve(about, wanted);
    if (ctx.step < ctx.from || ctx.step > ctx.to) [ctx.from, ctx.to] = [0, ctx.series.steps.length - 1];
    Object.assign(ctx, { go: set, now: () => ctx, view, quantiles: (name) => ctx.series.fit(ctx.step, ctx.layer, name) && lawAt(name) });
    const which = changes(before, ctx);
    if (which === null || which.includes("run")) {
      layer.replaceChildren(...options(ctx.series.layers.map((l) => [l.name, `${l.name} (${num(l.numel)})`])));
      beside.replaceChildren(...options([["", "nothing"], ...runs.filter(([name]) => name !== key(ctx.series))]));
      quantity.replaceChildren(...options([["norm", "norm"], ["xi", "ξ, shape of the tail"], ["zeros", "share of zeros"], ["alarm", "spikes of the norm"], ...ctx.series.rules.map((r) => [`rule:${r}`, `k̂/k of ${r}`])]));
      for (const b of ruleBoxes) b.box.disabled = !ctx.series.rules.includes(b.name);
    }
    const now = names(ctx);
    [run.value, beside.value, layer.value, quantity.value] = [now.run, now.beside, now.layer, now.quantity];
    step.max = ctx.series.steps.length - 1;
    [step.value, ratio.value] = [ctx.step, ctx.ratio];
    stepShown.textContent = num(now.step);
    ratioShown.textContent = String(now.ratio);
    step.setAttribute("aria-valuetext", `step ${now.step}`);
    ratio.setAttribute("aria-valuetext", String(now.ratio));
    for (const b of lawBoxes) b.box.checked = ctx.laws.includes(b.name);
    for (const b of ruleBoxes) b.box.checked = ctx.rules.includes(b.name);
    whole.hidden = ctx.from === 0 && ctx.to === ctx.series.steps.length - 1;
    for (const each of everything) if (which === null || each.uses.some((name) => which.includes(name))) each.show();
    if (which === null || which.length) say(summary());
    ask();
  }

  const lawAt = (name) => lawOf(name, ctx.series.fit(ctx.step, ctx.layer, name).params);

  function summary() {
    const { series } = ctx;
    const f = series.facts(ctx.step, ctx.layer);
    const kept = ctx.rules.map((r) => `${r} ${quality(series.rule(ctx.step, ctx.layer, r, ctx.ratio).quality)}`);
    return `${series.name}, step ${num(series.steps[ctx.step])}, ${series.layers[ctx.layer].name}: ${num(f.numel)} elements, norm ${num(f.norm)}, ξ ${num(f.xi)}, ${percent(f.zeroShare)} zeros. k̂/k at ratio ${about.ratios[ctx.ratio]}: ${kept.join(", ") || "no rule chosen"}.`;
  }

  /** Ask for the fits that are chosen and not there, where there is somebody to make them. */
  function ask() {
    const { series, step, layer } = ctx;
    for (const name of view.fit ? ctx.laws : []) {
      if (series.fit(step, layer, name)) continue;
      view.fit({ run: key(series), step: series.steps[step], layer: series.layers[layer].name, law: name }).then((found) => {
        series.remember(step, layer, name, found);
        for (const each of everything) if (each.uses.includes("laws")) each.show();
      });
    }
  }

  // figures are drawn when they come near the screen: a slider is to move what one sees
  const seen = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        const panel = panels.find((p) => p.node === target);
        panel.near = isIntersecting;
        if (panel.near && panel.stale) panel.show();
      }
    },
    { rootMargin: "200px" },
  );
  const all = () => panels.forEach((panel) => panel.near || ((panel.near = true), panel.show()));
  addEventListener("beforeprint", all);

  update(view.read());
  view.write(names(ctx));
  for (const panel of panels) seen.observe(panel.node);
  view.watch(() => update(view.read()));
  // a widget is drawn before its cell has its width
  const resized = new ResizeObserver(() => {
    for (const panel of panels) if (panel.near && Math.abs(panel.stage.clientWidth - panel.width) > 8) panel.show();
  });
  resized.observe(root);
  return () => {
    resized.disconnect();
    seen.disconnect();
    removeEventListener("beforeprint", all);
  };
}
