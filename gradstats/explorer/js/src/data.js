// What travels, unpacked, and what is read from it: gradstats/explorer/data.py packs it.

const TYPES = { i2: Int16Array, u4: Uint32Array, f4: Float32Array };
const NAN = -32768;
const LEAST = -32767;

async function unpack({ type, scale, delta, shape, data }) {
  const deflated = Uint8Array.fromBase64?.(data) ?? Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  const stream = new Blob([deflated]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const size = TYPES[type].BYTES_PER_ELEMENT;
  const n = planes.length / size;
  const bytes = new Uint8Array(planes.length);
  for (let b = 0; b < size; b++) for (let i = 0; i < n; i++) bytes[i * size + b] = planes[b * n + i];
  const values = new TYPES[type](bytes.buffer);
  if (delta) {
    const row = shape.at(-1);
    for (let first = 0; first < n; first += row)
      for (let i = first + 1; i < first + row; i++) values[i] += values[i - 1];
  }
  if (!scale) return values;
  const floats = new Float32Array(n);
  for (let i = 0; i < n; i++)
    floats[i] = values[i] === NAN ? NaN : values[i] === LEAST ? -Infinity : values[i] / scale;
  return floats;
}

async function unpackAll(arrays) {
  const names = Object.keys(arrays).filter((name) => arrays[name].data !== undefined);
  const values = await Promise.all(names.map((name) => unpack(arrays[name])));
  return Object.fromEntries(names.map((name, i) => [name, values[i]]));
}

/** Unpack a payload: its series become objects of Series. */
export async function load(text) {
  const about = JSON.parse(text);
  about.series = await Promise.all(
    about.series.map(async (s) => {
      const [arrays, fits] = await Promise.all([
        unpackAll(s.arrays),
        Promise.all(Object.values(s.fits).map(unpackAll)),
      ]);
      Object.keys(s.fits).forEach((law, i) => (fits[i].flags = s.fits[law].flags));
      return new Series(about, s, arrays, Object.fromEntries(Object.keys(s.fits).map((l, i) => [l, fits[i]])));
    }),
  );
  about.agreement = await Promise.all(
    about.agreement.map(async (a) => ({ ...a, values: await unpackAll(a.arrays) })),
  );
  return about;
}

/** The gradients of one rank and kind. Steps, layers and ratios are places in its lists. */
class Series {
  constructor(about, stored, arrays, fits) {
    Object.assign(this, stored, { about, arrays, fits });
    this.name = `${stored.run} · ${stored.kind} · rank ${stored.rank}`;
    this.asked = new Map();
  }

  cell(step, layer) {
    return step * this.layers.length + layer;
  }

  /** Numbers of a gradient: elements, zeros, finite and non-zero ones, norm, ξ. */
  facts(step, layer) {
    const cell = this.cell(step, layer);
    const { zeros, nonfinite, norm, xi, alarm } = this.arrays;
    const numel = this.layers[layer].numel;
    const finite = numel - nonfinite[cell];
    return {
      numel,
      finite,
      zeros: zeros[cell],
      nonfinite: nonfinite[cell],
      count: finite - zeros[cell],
      zeroShare: finite ? zeros[cell] / finite : 0,
      norm: norm[cell],
      xi: xi[cell],
      alarm: alarm[cell],
      largest: 2 ** this.arrays.magnitudes[cell * this.about.ranks],
    };
  }

  /** Rank of the i-th magnitude that travels, of n; between two, on a straight line of the logarithm. */
  rankAt(i, n) {
    const whole = (j) => Math.round(n ** (j / (this.about.ranks - 1)));
    const low = Math.floor(i);
    return i === low ? whole(i) : whole(low) * (whole(low + 1) / whole(low)) ** (i - low);
  }

  /** The magnitudes of a gradient at their ranks, largest first: [{rank, share, size}]. */
  curve(step, layer) {
    const { count, finite } = this.facts(step, layer);
    const first = this.cell(step, layer) * this.about.ranks;
    const points = [];
    for (let i = 0; count && i < this.about.ranks; i++) {
      const rank = this.rankAt(i, count);
      if (rank === points.at(-1)?.rank) continue; // small ranks are closer than whole ones
      points.push({ rank, share: rank / finite, size: 2 ** this.arrays.magnitudes[first + i] });
    }
    return points;
  }

  /** log₂ of the magnitude of a rank, between its neighbours; NaN where there is none. */
  logSize(step, layer, rank) {
    const { count } = this.facts(step, layer);
    if (!(rank >= 0.5 && rank <= count)) return NaN;
    const first = this.cell(step, layer) * this.about.ranks;
    const last = this.about.ranks - 1;
    let i = count > 1 ? Math.min(Math.floor(Math.max((last * Math.log(rank)) / Math.log(count), 0)), last - 1) : 0;
    // ranks are rounded, so the one before may be beyond, or the next not
    while (i > 0 && this.rankAt(i, count) > rank) i--;
    while (i < last - 1 && this.rankAt(i + 1, count) < rank) i++;
    const [low, high] = [this.rankAt(i, count), this.rankAt(i + 1, count)];
    const part = high > low ? Math.max(Math.log(rank / low) / Math.log(high / low), 0) : 0;
    const m = this.arrays.magnitudes;
    return m[first + i] + part * (m[first + i + 1] - m[first + i]);
  }

  /** log₂ k̂/k of a rule, as counted; −∞ where nothing was kept, NaN where it was not counted. */
  off(step, layer, rule, ratio) {
    const r = this.rules.indexOf(rule);
    if (r < 0) return NaN;
    const n = this.about.ratios.length;
    return this.arrays.off[(this.cell(step, layer) * this.rules.length + r) * n + ratio];
  }

  /** What a rule kept: {k, kept, quality, threshold}; the threshold stands at the last element kept. */
  rule(step, layer, rule, ratio) {
    const k = this.layers[layer].k[ratio];
    const quality = 2 ** this.off(step, layer, rule, ratio);
    const kept = Math.round(k * quality);
    return { rule, k, kept, quality, threshold: 2 ** this.logSize(step, layer, kept) };
  }

  /** Half the width of the noise floor of k̂/k, with the design effect where it is known. */
  floor(step, layer, ratio) {
    const k = this.layers[layer].k[ratio];
    const design = this.arrays.design[this.cell(step, layer) * this.about.ratios.length + ratio];
    return { design, half: 1.96 * Math.sqrt(Math.max(design || 1, 1) / k) };
  }

  /** A fit: {params, stderr, tailError, flags}; undefined where there is none yet. */
  fit(step, layer, name) {
    const cell = this.cell(step, layer);
    if (this.asked.has(`${name} ${cell}`)) return this.asked.get(`${name} ${cell}`);
    const of = this.fits[name];
    if (!of) return undefined;
    const names = this.about.laws.find((l) => l.name === name).parameters.map((p) => p.name);
    const at = cell * names.length;
    return this.named(names, {
      params: [...of.params.subarray(at, at + names.length)],
      stderr: names.map((_, i) => 2 ** of.stderr[at + i] * Math.abs(of.params[at + i])),
      tail_error: of.tail_error[cell],
      flags: of.flags[of.flag[cell]],
    });
  }

  named(names, { params, stderr, tail_error, flags }) {
    const by = (values) => Object.fromEntries(names.map((n, i) => [n, values[i]]));
    return { params: by(params), stderr: by(stderr), tailError: tail_error, flags };
  }

  /** Keep a fit that was made when it was asked for. */
  remember(step, layer, name, found) {
    const names = this.about.laws.find((l) => l.name === name).parameters.map((p) => p.name);
    this.asked.set(`${name} ${this.cell(step, layer)}`, this.named(names, found));
  }

  /** The place of the step nearest to one of another series. */
  nearest(step) {
    return this.steps.reduce((best, s, i) => (Math.abs(s - step) < Math.abs(this.steps[best] - step) ? i : best), 0);
  }
}
