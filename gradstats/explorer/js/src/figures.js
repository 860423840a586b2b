// The figures: what is drawn from a view. Only `draw` and `cells` know the library.
import * as Plot from "@observablehq/plot";
import { interpolateCividis } from "d3-scale-chromatic";
import { law } from "./laws.js";

const SUPERSCRIPTS = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
const NARROW = 560;

/** A number with three digits, minus signs and powers of ten as in print. */
export function num(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (Number.isInteger(x) && size < 1e15) return x.toLocaleString("en").replace("-", "−");
  if (size >= 1e-3 && size < 1e5) return String(Number(x.toPrecision(3))).replace("-", "−");
  const [digits, power] = x.toExponential(2).split("e");
  const raised = [...String(Number(power))].map((c) => SUPERSCRIPTS[c]).join("");
  return `${Number(digits)}·10${raised}`.replace(/^(-?)1·/, "$1").replace("-", "−");
}

/** k̂/k with as many digits as it takes to see that it is not one. */
export const quality = (x) => (Number.isNaN(x) ? "–" : x === 0 ? "0" : x < 9.9995 && x > 0.0995 ? x.toFixed(3) : num(x));

function draw({ marks, ...options }) {
  const figure = Plot.plot({
    marginLeft: 58,
    marginRight: 14,
    marginTop: 22,
    marginBottom: 36,
    style: { background: "none", fontSize: "12px", fontFamily: "system-ui, sans-serif", overflow: "visible" },
    ...options,
    marks: marks.flat(2).filter(Boolean),
  });
  figure.removeAttribute("class"); // the library's own style sheet is not needed, and a saved file has none
  figure.querySelector("style")?.remove();
  figure.setAttribute("font-size", 12);
  figure.setAttribute("font-family", "system-ui, sans-serif");
  figure.setAttribute("text-anchor", "middle");
  figure.setAttribute("fill", "currentColor");
  return figure;
}

/** A picture of cells: `value(column, row)` in [0, 1], or NaN for none. One image, however many cells there are. */
function picture(columns, rows, value) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [Math.max(columns, 1), Math.max(rows, 1)];
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  for (let row = 0; row < rows; row++)
    for (let column = 0; column < columns; column++) {
      const x = value(column, row);
      if (Number.isNaN(x)) continue;
      const at = 4 * (row * columns + column);
      const colour = COLOURS[Math.round(255 * Math.min(Math.max(x, 0), 1))];
      for (let i = 0; i < 3; i++) image.data[at + i] = colour[i];
      image.data[at + 3] = 255;
    }
  context.putImageData(image, 0, 0);
  return canvas.toDataURL();
}

const COLOURS = Array.from({ length: 256 }, (_, i) => interpolateCividis(i / 255).match(/\d+/g).map(Number));

const svg = (tag, attributes, text = "") => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  return node;
};

/** A mark: the image over a rectangle of the axes, and the scale of its colours above. */
function cells(url, [x1, x2], [y1, y2], [least, title, most]) {
  return (_, { x, y }, __, { width, marginRight }) => {
    const group = svg("g", {});
    const [left, right] = [x(x1), x(x2)];
    const [top, bottom] = [Math.min(y(y1), y(y2)), Math.max(y(y1), y(y2))];
    const box = { x: left, y: top, width: right - left, height: bottom - top };
    const shown = { preserveAspectRatio: "none", style: "image-rendering: pixelated", href: url };
    group.append(svg("image", { ...box, ...shown }));
    const end = width - marginRight;
    group.append(
      svg("text", { x: end - 154, y: 10, "text-anchor": "end", "font-size": 11 }, `${title}: ${least}`),
      svg("image", { x: end - 150, y: 2, width: 100, height: 9, preserveAspectRatio: "none", href: ramp() }),
      svg("text", { x: end - 46, y: 10, "text-anchor": "start", "font-size": 11 }, most),
    );
    return group;
  };
}

let drawnRamp = "";
const ramp = () => (drawnRamp ||= picture(64, 1, (column) => column / 63));

/** A colour of the palette, which is chosen for white pages, made lighter on dark ones. */
export const shade = (color) => `color-mix(in srgb, ${color}, white var(--gs-lift))`;

const dashed = (look) => ({ stroke: shade(look.color), strokeDasharray: look.dash || undefined });

/** A logarithmic axis with a tick at 1, 2 and 5, at powers of ten if it is long, or at some of these. */
function sized(domain, pixels) {
  const [low, high] = domain.map(Math.log10);
  const room = Math.max(2, Math.floor(pixels / 55));
  const powers = Math.floor(high) - Math.ceil(low) + 1;
  const subs = high - low < 2.5 && 3 * powers <= room + 2 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil(powers / room));
  const ticks = [];
  for (let p = Math.floor(low); p <= high; p++)
    if (subs.length > 1 || p % every === 0)
      for (const sub of subs) if (sub * 10 ** p >= domain[0] && sub * 10 ** p <= domain[1]) ticks.push(Number(`${sub}e${p}`));
  return { type: "log", domain, ticks: ticks.length > 1 ? ticks : domain, tickFormat: num, labelArrow: "none" };
}

const halo = { stroke: "var(--gs-back)", strokeWidth: 4, strokeLinejoin: "round" };

const LEFT = (width) => (width < NARROW ? 96 : 178);

function overSteps({ series, from, to }, width, left = 58) {
  const marks = Math.max(2, Math.floor((width - left) / 70));
  const every = Math.ceil((to - from + 1) / marks);
  const ticks = [];
  for (let i = from; i <= to; i += every) ticks.push(i);
  return {
    ...{ type: "linear", domain: [from - 0.5, to + 0.5], label: "step", labelAnchor: "center" },
    ...{ ticks, tickFormat: (i) => num(series.steps[i]), labelArrow: "none" },
  };
}

const here = ({ step }) => Plot.ruleX([step], { stroke: "currentColor", strokeWidth: 1.5, strokeDasharray: "2 2" });

const inView = ({ series, from, to }) => series.steps.map((_, i) => i).slice(from, to + 1);

// ---------------------------------------------------------------- overview

const BINS = 160;
const DECADES = 5;

/** Share of the elements per octave of magnitude, by column (step) and row (largest magnitudes first). */
function densities({ series, layer }, steps, low, high) {
  const { magnitudes } = series.arrays;
  const n = series.about.ranks;
  const found = new Float32Array(steps.length * BINS);
  const width = (high - low) / BINS;
  steps.forEach((step, column) => {
    const { count, finite } = series.facts(step, layer);
    const first = series.cell(step, layer) * n;
    let before = 0;
    let i = 0;
    for (let row = 0; row < BINS && count; row++) {
      const edge = high - (row + 1) * width;
      while (i < n && magnitudes[first + i] >= edge) i++;
      // between two ranks that travel, the logarithm of the rank is taken as linear in that of the magnitude
      let place = i - 1;
      if (i > 0 && i < n) {
        const gap = magnitudes[first + i - 1] - magnitudes[first + i];
        place += gap > 0 ? (magnitudes[first + i - 1] - edge) / gap : 0;
      }
      const above = i > 0 ? series.rankAt(place, count) : 0;
      found[column * BINS + row] = (above - before) / finite / width;
      before = above;
    }
  });
  return found;
}

const remembered = new Map();
/** Remember the last few pictures: they take longer than all lines. */
function once(key, make) {
  if (!remembered.has(key)) {
    if (remembered.size > 12) remembered.delete(remembered.keys().next().value);
    remembered.set(key, make());
  }
  return remembered.get(key);
}

const QUANTILES = [0.1, 0.01, 0.001];
const QUANTILE_DASHES = ["", "5 3", "2 3"];

function magnitudeMap(ctx, width) {
  const { series, layer, from, to } = ctx;
  const steps = inView(ctx);
  const { url, low, high } = once(`heat ${series.name} ${layer} ${from} ${to}`, () => {
    let [low, high] = [Infinity, -Infinity];
    for (const step of steps) {
      const { count } = series.facts(step, layer);
      if (!count) continue;
      high = Math.max(high, series.logSize(step, layer, 1));
      low = Math.min(low, series.logSize(step, layer, Math.max(0.7 * count, 1)));
    }
    if (!(low < high)) [low, high] = Number.isFinite(low) ? [low - 1, low + 1] : [-1, 1];
    const shares = densities(ctx, steps, low, high);
    const shade = (column, row) => {
      const share = shares[column * BINS + row];
      return share > 0 ? 1 + Math.log10(Math.min(share, 1)) / DECADES : NaN;
    };
    return { url: picture(steps.length, BINS, shade), low, high };
  });
  const lines = QUANTILES.map((ratio, i) => {
    const points = steps
      .map((step) => ({ step, size: 2 ** series.logSize(step, layer, Math.max(ratio * series.facts(step, layer).finite, 1)) }))
      .filter((p) => p.size > 0);
    const last = points.at(-1);
    return [
      Plot.line(points, { x: "step", y: "size", stroke: "white", strokeWidth: 3.5 }),
      Plot.line(points, { x: "step", y: "size", stroke: "#111", strokeWidth: 1.5, strokeDasharray: QUANTILE_DASHES[i] }),
      last && Plot.text([last], { x: "step", y: "size", text: () => `${ratio} largest`, fill: "#111", stroke: "white", strokeWidth: 4, textAnchor: "end", dx: -4, dy: -8 }),
    ];
  });
  return draw({
    ...{ width, height: width < NARROW ? 260 : 320, marginLeft: LEFT(width) },
    x: overSteps(ctx, width, LEFT(width)),
    y: { ...sized([2 ** low, 2 ** high], 320), label: "magnitude |g|" },
    marks: [
      cells(url, [from - 0.5, to + 0.5], [2 ** low, 2 ** high], ["≤ 10⁻⁵", width < NARROW ? "share" : "share of elements per octave", "1"]),
      lines,
      here(ctx),
    ],
  });
}

function loss(ctx, width) {
  const points = inView(ctx)
    .map((step) => ({ step, loss: ctx.series.losses[step] }))
    .filter((p) => p.loss !== null);
  if (!points.length) return "The run recorded no loss.";
  return draw({
    ...{ width, height: 130, marginLeft: LEFT(width) },
    x: overSteps(ctx, width, LEFT(width)),
    y: { label: "loss", ticks: 4, grid: true, labelArrow: "none", tickFormat: num },
    marks: [Plot.line(points, { x: "step", y: "loss", strokeWidth: 1.5 }), Plot.dot(points, { x: "step", y: "loss", r: points.length > 60 ? 0 : 2.5, fill: "currentColor" }), here(ctx)],
  });
}

/** What strips show of a layer in a step, by the name of the quantity: a number, its shade, and in words. */
export function stripOf({ series, ratio, quantity }) {
  const rule = quantity.startsWith("rule:") ? quantity.slice(5) : "";
  if (rule)
    return {
      title: `k̂/k of ${rule} at ${series.about.ratios[ratio]}`,
      ends: ["≤ ⅛", "≥ 8"],
      value: (step, layer) => 2 ** series.off(step, layer, rule, ratio),
      shade: (value) => 0.5 + Math.log2(value) / 6,
      words: (value) => `k̂/k ${quality(value)}`,
    };
  if (quantity === "norm") {
    const middle = series.layers.map((_, layer) => {
      const known = series.steps.map((_, step) => Math.log2(series.facts(step, layer).norm)).filter(Number.isFinite);
      return known.length ? known.reduce((a, b) => a + b, 0) / known.length : NaN;
    });
    return {
      title: "norm ÷ the layer's geometric mean",
      ends: ["≤ ¼", "≥ 4"],
      value: (step, layer) => series.facts(step, layer).norm / 2 ** middle[layer],
      shade: (value) => (value > 0 ? 0.5 + Math.log2(value) / 4 : NaN),
      words: (value) => `norm ${num(value)} times the layer's geometric mean`,
    };
  }
  if (quantity === "xi")
    return {
      title: "ξ, shape of the tail",
      ends: ["≤ −½", "≥ ½"],
      value: (step, layer) => series.facts(step, layer).xi,
      shade: (value) => 0.5 + value,
      words: (value) => `ξ ${num(value)}`,
    };
  if (quantity === "alarm")
    return {
      title: "spikes of the norm, as Monitor tells them",
      ends: ["collapse", "spike or growth"],
      value: (step, layer) => series.facts(step, layer).alarm,
      shade: (value) => ({ "-1": 0, 0: 0.5, 1: 1, 2: 0.8 })[value] ?? NaN,
      words: (value) => ({ "-1": "its norm collapses", 0: "no spike", 1: "its norm spikes", 2: "its norm has grown" })[value] ?? "too few steps before to tell a spike",
    };
  return {
    title: "share of zeros",
    ends: ["0", "1"],
    value: (step, layer) => series.facts(step, layer).zeroShare,
    shade: (value) => value,
    words: (value) => `${num(100 * value)} % zeros`,
  };
}

function strips(ctx, width) {
  const { series, layer, from, to, quantity, ratio } = ctx;
  const steps = inView(ctx);
  const { title, ends, value, shade } = stripOf(ctx);
  const of = quantity.startsWith("rule:") ? ratio : "";
  const n = series.layers.length;
  const url = once(`strips ${series.name} ${from} ${to} ${quantity} ${of}`, () =>
    picture(steps.length, n, (column, row) => shade(value(steps[column], row))),
  );
  const left = LEFT(width);
  const each = n > 40 ? 9 : n > 20 ? 12 : 16;
  const every = Math.ceil(11 / each);
  const longest = Math.floor((left - 12) / 6.2);
  const short = (name) => (name.length > longest ? `…${name.slice(1 - longest)}` : name);
  const ticks = series.layers.map((_, i) => i).filter((i) => i === layer || (i % every === 0 && Math.abs(i - layer) * each > 10));
  return draw({
    ...{ width, height: n * each + 60, marginLeft: left },
    x: overSteps(ctx, width, left),
    y: { type: "linear", domain: [n - 0.5, -0.5], axis: null },
    marks: [
      cells(url, [from - 0.5, to + 0.5], [-0.5, n - 0.5], [ends[0], width < NARROW ? title.split(/[,÷]/)[0].trim() : title, ends[1]]),
      Plot.text(ticks, { x: from - 0.5, y: (i) => i, text: (i) => `${i === layer ? "▸ " : ""}${short(series.layers[i].name)}`, textAnchor: "end", dx: -5, fontSize: 10.5, fontWeight: (i) => (i === layer ? "bold" : "normal") }),
      Plot.rect([layer], { x1: from - 0.5, x2: to + 0.5, y1: (i) => i - 0.5, y2: (i) => i + 0.5, stroke: "white", strokeWidth: 2.5, fill: "none" }),
      Plot.rect([layer], { x1: from - 0.5, x2: to + 0.5, y1: (i) => i - 0.5, y2: (i) => i + 0.5, stroke: "#111", strokeWidth: 1, fill: "none" }),
      here(ctx),
    ],
  });
}

// ---------------------------------------------------------------- one step

function lawsOf(ctx) {
  const { zeroShare } = ctx.series.facts(ctx.step, ctx.layer);
  return ctx.laws.flatMap((name) => {
    const fit = ctx.series.fit(ctx.step, ctx.layer, name);
    const look = ctx.about.laws.find((l) => l.name === name);
    const known = fit && Object.values(fit.params).every(Number.isFinite);
    return known ? [{ look, fit, zeroShare, ...law(name, fit.params) }] : [];
  });
}

const grid = (low, high, n = 120) => Array.from({ length: n }, (_, i) => low * (high / low) ** (i / (n - 1)));

const NOTHING = "This layer has no element that is finite and not zero in this step.";

function survival(ctx, width) {
  const { series, beside, step, layer, ratio, rules, about } = ctx;
  const curve = series.curve(step, layer);
  const { count, finite } = series.facts(step, layer);
  if (!count) return NOTHING;
  const other = beside ? beside.curve(ctx.besideStep, ctx.besideLayer) : [];
  const left = 2 ** Math.min(series.logSize(step, layer, Math.max(0.8 * count, 1)), Math.log2(other.at(-15)?.size ?? Infinity));
  const right = 2 * Math.max(curve[0].size, other[0]?.size ?? 0);
  const domain = [Math.min(left, right / 4), right];
  const bottom = 0.5 / finite;
  const laws = lawsOf(ctx);
  const lines = laws.map((l) =>
    Plot.line(
      grid(...domain).map((x) => ({ x, y: (1 - l.zeroShare) * l.sf(x) })).filter((p) => p.y >= bottom),
      { x: "x", y: "y", strokeWidth: 1.5, clip: true, ...dashed(l.look) },
    ),
  );
  const asked = about.ratios[ratio];
  const placed = rules
    .map((name) => ({ ...series.rule(step, layer, name, ratio), look: about.rules.find((r) => r.name === name) }))
    .filter((r) => r.kept > 0)
    .sort((a, b) => a.threshold - b.threshold);
  const rows = Math.max(placed.length, 1);
  placed.forEach((r, i) => {
    r.share = r.kept / finite;
    r.at = bottom * (0.9 / bottom) ** (0.06 + (0.5 * i) / rows); // a row of its own: labels never overlap
    r.end = Math.log(r.threshold / domain[0]) > 0.6 * Math.log(domain[1] / domain[0]);
  });
  const marked = (end) =>
    Plot.text(placed.filter((r) => r.end === end), { x: "threshold", y: "at", text: (r) => `${r.rule} ${quality(r.quality)}`, fill: "currentColor", textAnchor: end ? "end" : "start", dx: end ? -5 : 5, ...halo });
  return draw({
    ...{ width, height: 380 },
    x: { ...sized(domain, width), label: "magnitude |g|", labelAnchor: "center" },
    y: { ...sized([bottom, 1.5], 380), label: "share of elements ≥ |g|", grid: true },
    color: { type: "identity" },
    symbol: { type: "identity" },
    marks: [
      Plot.ruleY([asked], { strokeDasharray: "1 3" }),
      Plot.text([asked], { x: domain[1], y: asked, text: () => `ratio ${asked}`, textAnchor: "end", dy: -7, ...halo, fill: "currentColor" }),
      placed.map((r) => Plot.ruleX([r], { x: "threshold", ...dashed(r.look), strokeWidth: 1.3, clip: true })),
      other.length && Plot.line(other, { x: "size", y: "share", strokeWidth: 5, strokeOpacity: 0.3, clip: true }),
      Plot.line(curve, { x: "size", y: "share", strokeWidth: 2.2, clip: true }),
      lines,
      Plot.dot(placed, { x: "threshold", y: "share", fill: (r) => shade(r.look.color), symbol: (r) => r.look.symbol, stroke: "var(--gs-back)", strokeWidth: 1, r: 5 }),
      marked(false),
      marked(true),
    ],
  });
}

function density(ctx, width) {
  const { series, step, layer } = ctx;
  const { count, finite } = series.facts(step, layer);
  if (!count) return NOTHING;
  const curve = series.curve(step, layer);
  const points = [];
  let above = curve[0];
  for (const point of curve.slice(1)) {
    if (!(point.size < above.size * 0.97)) continue; // ranks closer than that say more of rounding than of the gradient
    points.push({ x: Math.sqrt(point.size * above.size), y: (point.rank - above.rank) / finite / (above.size - point.size) });
    above = point;
  }
  if (!points.length) return "All magnitudes are about the same: there is no density to draw.";
  const domain = [points.at(-1).x, 1.2 * curve[0].size];
  const [low, high] = [Math.min(...points.map((p) => p.y)) / 3, 3 * Math.max(...points.map((p) => p.y))];
  const lines = lawsOf(ctx).map((l) =>
    Plot.line(
      grid(...domain).map((x) => ({ x, y: (1 - l.zeroShare) * l.pdf(x) })).filter((p) => p.y >= low && p.y <= high),
      { x: "x", y: "y", strokeWidth: 1.5, ...dashed(l.look) },
    ),
  );
  return draw({
    ...{ width, height: 300 },
    x: { ...sized(domain, width), label: "magnitude |g|", labelAnchor: "center" },
    y: { ...sized([low, high], 300), label: "density of |g|", grid: true },
    marks: [Plot.line(points, { x: "x", y: "y", strokeWidth: 2.2, curve: "step" }), lines],
  });
}

function qq(ctx, width) {
  const { series, step, layer } = ctx;
  const { count } = series.facts(step, layer);
  if (!count) return NOTHING;
  const curve = series.curve(step, layer);
  const top = 3 * curve[0].size;
  const domain = [Math.min(2 ** series.logSize(step, layer, Math.max(0.8 * count, 1)), top / 6), top];
  const laws = lawsOf(ctx);
  if (!laws.length) return "No law is chosen that has been fitted here.";
  const lines = laws.map((l) => {
    const points = curve.map((p) => ({ x: l.isf(Math.min(Math.max((p.rank - 0.5) / count, 1e-15), 1)), y: p.size }));
    const inside = points.filter((p) => p.x >= domain[0] && p.x <= domain[1] && p.y >= domain[0]);
    return Plot.line(inside, { x: "x", y: "y", strokeWidth: 1.8, ...dashed(l.look) });
  });
  return draw({
    ...{ width, height: 300 },
    x: { ...sized(domain, width), label: "magnitude the law expects", labelAnchor: "center" },
    y: { ...sized(domain, 300), label: "captured magnitude", grid: true },
    marks: [Plot.line(domain, { x: (d) => d, y: (d) => d, strokeOpacity: 0.6 }), lines],
  });
}

// ---------------------------------------------------------------- thresholds and ranks

function ruleSeries(ctx, width) {
  const { series, layer, ratio, rules, about } = ctx;
  const steps = inView(ctx);
  if (!rules.length) return "No rule is chosen.";
  const values = rules.flatMap((name) => steps.map((step) => 2 ** series.off(step, layer, name, ratio)));
  const floors = steps.map((step) => ({ step, ...series.floor(step, layer, ratio) }));
  const known = values.filter((v) => v > 0 && Number.isFinite(v));
  const widest = Math.max(...floors.map((f) => f.half));
  const low = Math.max(Math.min(...known, widest < 1 ? 1 - widest : 0.1, 0.8) / 1.3, 1e-4);
  const high = Math.max(...known, 1 + widest, 1.25) * 1.3;
  const lines = rules.map((name) => {
    const look = about.rules.find((r) => r.name === name);
    const points = steps
      .map((step) => ({ step, value: 2 ** series.off(step, layer, name, ratio) }))
      .filter((p) => !Number.isNaN(p.value));
    const nothing = points.filter((p) => p.value === 0);
    const shown = points.map((p) => ({ step: p.step, value: Math.max(p.value, low) }));
    const few = shown.length <= 60;
    return [
      Plot.line(shown, { x: "step", y: "value", strokeWidth: 1.5, ...dashed(look) }),
      Plot.dot(few ? shown : shown.filter((_, i) => i % Math.ceil(shown.length / 12) === 0), { x: "step", y: "value", fill: shade(look.color), symbol: look.symbol, r: 3.5 }),
      Plot.text(nothing, { x: "step", y: low, text: () => "0", fill: "currentColor", dy: -6, ...halo }),
    ];
  });
  return draw({
    ...{ width, height: 320 },
    x: overSteps(ctx, width),
    y: { ...sized([low, high], 320), label: `k̂/k at ratio ${about.ratios[ratio]}`, grid: true },
    symbol: { type: "identity" },
    marks: [
      Plot.areaY(floors, { x: "step", y1: (f) => Math.max(1 - f.half, low), y2: (f) => Math.min(1 + f.half, high), fill: "currentColor", fillOpacity: 0.13 }),
      Plot.ruleY([1]),
      lines,
      here(ctx),
    ],
  });
}

const SHARED = {
  cosine: { text: "cosine", stroke: "#0173b2", dash: "" },
  signs: { text: "same sign", stroke: "#029e73", dash: "6 3" },
  overlap: { text: "overlap of the k largest", stroke: "#d55e00", dash: "2 3" },
};

function rankLine(ctx, name, style) {
  const { shared, layer, series } = ctx;
  const [layers, ratios] = [series.layers.length, ctx.about.ratios.length];
  const points = shared.steps
    .map((step, i) => ({ step: series.steps.indexOf(step), value: shared.values[name][(i * layers + layer) * ratios + ctx.ratio] }))
    .filter((p) => p.step >= ctx.from && p.step <= ctx.to && !Number.isNaN(p.value));
  const last = points.at(-1);
  return [
    Plot.line(points, { x: "step", y: "value", strokeWidth: 1.8, stroke: style.stroke, strokeDasharray: style.dash || undefined }),
    points.length < 60 && Plot.dot(points, { x: "step", y: "value", r: 2, fill: style.stroke }),
    last && Plot.text([last], { x: "step", y: "value", text: () => style.text, textAnchor: "end", dy: -9, fill: "currentColor", ...halo }),
  ];
}

const ONE_RANK = "Ranks can be compared where several were captured with every element.";

function agreementOf(ctx, width) {
  if (!ctx.shared) return ONE_RANK;
  return draw({
    ...{ width, height: 260 },
    x: overSteps(ctx, width),
    y: { label: "between two ranks", labelArrow: "none", grid: true, domain: [Math.min(0, ...ctx.shared.values.cosine.filter(Number.isFinite)), 1] },
    marks: [Object.entries(SHARED).map(([name, style]) => rankLine(ctx, name, style)), here(ctx)],
  });
}

function unionOf(ctx, width) {
  if (!ctx.shared) return "";
  const most = ctx.shared.ranks.length;
  return draw({
    ...{ width, height: 260 },
    x: overSteps(ctx, width),
    y: { label: `positions that the ${most} ranks select together ÷ k`, labelArrow: "none", grid: true, domain: [1, most] },
    marks: [rankLine(ctx, "union", { text: "union ÷ k", stroke: "#0173b2", dash: "" }), here(ctx)],
  });
}

/** Figures by section. `uses` names what of the view they show, so that nothing else draws them again. */
export const FIGURES = [
  { id: "loss", height: 130, section: "overview", title: "Loss", uses: ["run", "range", "step"], draw: loss, steps: true },
  { id: "magnitudes", height: 320, section: "overview", title: "Magnitudes over the steps", uses: ["run", "layer", "range", "step"], draw: magnitudeMap, steps: true },
  { id: "strips", height: 300, section: "overview", title: "Layers", uses: ["run", "layer", "range", "step", "quantity", "stripRatio"], draw: strips, steps: true, layers: true },
  { id: "survival", height: 380, section: "step", title: "Share above a magnitude", uses: ["run", "beside", "layer", "step", "ratio", "laws", "rules"], draw: survival, wide: true },
  { id: "density", height: 300, section: "step", title: "Density", uses: ["run", "layer", "step", "laws"], draw: density },
  { id: "qq", height: 300, section: "step", title: "Q–Q", uses: ["run", "layer", "step", "laws"], draw: qq },
  { id: "thresholds", height: 320, section: "thresholds", title: "k̂/k over the steps", uses: ["run", "layer", "range", "step", "ratio", "rules"], draw: ruleSeries, steps: true, wide: true },
  { id: "agreement", height: 260, section: "ranks", title: "Agreement", uses: ["run", "layer", "range", "step", "ratio"], draw: agreementOf, steps: true },
  { id: "union", height: 260, section: "ranks", title: "Union", uses: ["run", "layer", "range", "step", "ratio"], draw: unionOf, steps: true },
];
