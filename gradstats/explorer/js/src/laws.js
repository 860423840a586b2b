// Laws of magnitudes, as the distributions of gradstats.statistics.laws: share above x, its inverse, density.
// Parameters are those that Python fitted, by the same names. A test compares each with SciPy.
import betainc from "@stdlib/math-base-special-betainc";
import erfc from "@stdlib/math-base-special-erfc";
import erfcinv from "@stdlib/math-base-special-erfcinv";
import gammainc from "@stdlib/math-base-special-gammainc";
import gammaincinv from "@stdlib/math-base-special-gammaincinv";
import gammaln from "@stdlib/math-base-special-gammaln";
import betaincinv from "@stdlib/math-base-special-kernel-betaincinv";

const upper = (x, a) => (x > 0 ? gammainc(x, a, true, true) : 1);

// Of scale 1: z is a magnitude over the scale, q a share, p the parameters.
const standard = {
  laplace: {
    sf: (z) => Math.exp(-z),
    isf: (q) => -Math.log(q),
    pdf: (z) => Math.exp(-z),
  },
  dgamma: {
    sf: (z, { a }) => upper(z, a),
    isf: (q, { a }) => gammaincinv(q, a, true),
    pdf: (z, { a }) => Math.exp((a - 1) * Math.log(z) - z - gammaln(a)),
  },
  double_genpareto: {
    sf: (z, { c }) => (c === 0 ? Math.exp(-z) : c * z <= -1 ? 0 : Math.exp(-Math.log1p(c * z) / c)),
    isf: (q, { c }) => (c === 0 ? -Math.log(q) : Math.expm1(-c * Math.log(q)) / c),
    pdf: (z, { c }) => (c === 0 ? Math.exp(-z) : c * z <= -1 ? 0 : Math.exp(-(1 + 1 / c) * Math.log1p(c * z))),
  },
  norm: {
    sf: (z) => erfc(z / Math.SQRT2),
    isf: (q) => Math.SQRT2 * erfcinv(q),
    pdf: (z) => Math.sqrt(2 / Math.PI) * Math.exp((-z * z) / 2),
  },
  t: {
    sf: (z, { df }) => betainc(df / (df + z * z), df / 2, 0.5),
    isf(q, { df }) {
      // the density is level there, and the solver loses what is left to 1
      if (1 - q < 1e-6) return (1 - q) / standard.t.pdf(0, { df });
      // it gives x and 1 − x, so that little is lost where x is near 1
      const [x, rest] = betaincinv(df / 2, 0.5, q, 1 - q);
      return Math.sqrt((df * rest) / x);
    },
    pdf: (z, { df }) =>
      2 *
      Math.exp(
        gammaln((df + 1) / 2) -
          gammaln(df / 2) -
          Math.log(df * Math.PI) / 2 -
          ((df + 1) / 2) * Math.log1p((z * z) / df),
      ),
  },
  gennorm: {
    sf: (z, { beta }) => upper(z ** beta, 1 / beta),
    isf: (q, { beta }) => gammaincinv(q, 1 / beta, true) ** (1 / beta),
    pdf: (z, { beta }) => Math.exp(Math.log(beta) - gammaln(1 / beta) - z ** beta),
  },
  dweibull: {
    sf: (z, { c }) => Math.exp(-(z ** c)),
    isf: (q, { c }) => (-Math.log(q)) ** (1 / c),
    pdf: (z, { c }) => c * z ** (c - 1) * Math.exp(-(z ** c)),
  },
  lognorm: {
    sf: (z, { s }) => erfc(Math.log(z) / (s * Math.SQRT2)) / 2,
    isf: (q, { s }) => Math.exp(s * Math.SQRT2 * erfcinv(2 * q)),
    pdf: (z, { s }) =>
      Math.exp(-((Math.log(z) / s) ** 2) / 2) / (z * s * Math.sqrt(2 * Math.PI)),
  },
};

/** Return a fitted law of the non-zero magnitudes: {sf(x), isf(q), pdf(x)}. */
export function law(name, parameters) {
  const { sf, isf, pdf } = standard[name];
  const { scale } = parameters;
  return {
    sf: (x) => sf(x / scale, parameters),
    isf: (q) => scale * isf(q, parameters),
    pdf: (x) => pdf(x / scale, parameters) / scale,
  };
}
