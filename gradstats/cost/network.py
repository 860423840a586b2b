"""What communication and local work cost: lines fitted to measurements, for any number of workers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gradstats.errors import InputError

__all__ = ["ALGORITHMS", "Interval", "Line", "Network", "Work", "fit_line", "interval"]

_FORMAT = "gradstats-network"
SCHEMA = 1
_ROUNDS = 20
_SIGNIFICANT = 1e-6


def _log2(n: int) -> int:
    return math.ceil(math.log2(n))


_Terms: TypeAlias = Callable[[int], tuple[float, float]]

ALGORITHMS: dict[str, dict[str, _Terms]] = {
    "all_reduce": {
        "ring": lambda n: (2 * (n - 1), 2 * (n - 1) / n),
        "rabenseifner": lambda n: (2 * _log2(n), 2 * (n - 1) / n),
        "recursive doubling": lambda n: (_log2(n), _log2(n)),
    },
    "all_gather": {
        "ring": lambda n: (n - 1, n - 1),
        "recursive doubling": lambda n: (_log2(n), n - 1),
    },
    "reduce_scatter": {
        "ring": lambda n: (n - 1, (n - 1) / n),
        "recursive halving": lambda n: (_log2(n), (n - 1) / n),
    },
    "broadcast": {"binomial tree": lambda n: (_log2(n), _log2(n))},
    "hop": {"ring": lambda n: (1, 1)},
}
"""By collective and algorithm: number of workers to (messages one after the other, bytes under way one after the other
per byte of the argument), of which the first multiply α and the second β. The first algorithm of each is the default.

The argument is the vector in an all-reduce, reduce-scatter or broadcast, one rank's message in an all-gather and in a
hop, where every rank sends to the next one and receives from the one before."""


class Work(NamedTuple):
    """Calls of one operation.

    Attributes
    ----------
    operation : a collective of :data:`ALGORITHMS`, or local work.
    size : of one call: bytes of a collective's argument, elements of local work.
    times : calls, one after the other.
    """

    operation: str
    size: float
    times: float = 1


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of an operation: fixed + slope · size, fitted to a sweep of sizes.

    Attributes
    ----------
    operation : a collective, its size in bytes; or local work, its size in elements.
    world : workers it was measured with; 1 for local work.
    fixed : seconds however small, α times the messages.
    slope : seconds per byte or element, β or γ.
    covariance : of (fixed, slope), 2 × 2.
    degrees : of freedom of the fit; 0 for a line that is assumed.
    spread : standard deviation of the measurements about the line, relative.
    noise : median standard error of a measurement, relative. A spread far above it is the line's fault, not the
        noise's: it is then no model of this operation.
    sizes, seconds : the sweep, medians.
    """

    operation: str
    world: int
    fixed: float
    slope: float
    covariance: tuple[tuple[float, float], tuple[float, float]] = ((0.0, 0.0), (0.0, 0.0))
    degrees: int = 0
    spread: float = 0.0
    noise: float = 0.0
    sizes: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()

    def at(self, size: float) -> float:
        """Return the seconds of one call."""
        return self.fixed + self.slope * size

    def confidence(self) -> tuple[Interval, Interval]:
        """Return 95 % intervals of `fixed` and `slope`, cut at zero."""
        from scipy.stats import t

        width = t.ppf(0.975, self.degrees) if self.degrees else 0.0
        error = np.sqrt(np.diag(self.covariance)) * width
        fixed, slope = (
            Interval(value, max(0.0, value - float(e)), value + float(e))
            for value, e in zip((self.fixed, self.slope), error, strict=True)
        )
        return fixed, slope

    def drawn(self, generator: np.random.Generator) -> Line:
        """Return a line as it may be: coefficients from their distribution, off by the spread altogether."""
        if not self.degrees:
            return self
        # t-distributed: the variance about the line is itself an estimate
        scale = math.sqrt(self.degrees / generator.chisquare(self.degrees))
        draw = generator.multivariate_normal((0, 0), self.covariance, method="svd") * scale
        factor = math.exp(self.spread * generator.standard_normal() * scale)
        fixed, slope = np.maximum(np.add((self.fixed, self.slope), draw), 0) * factor
        return replace(self, fixed=float(fixed), slope=float(slope))


def fit_line(
    operation: str, world: int, sizes: Sequence[float], seconds: Sequence[Sequence[float]]
) -> Line:
    """Fit seconds = fixed + slope · size by weighted least squares.

    Sizes run over decades, so relative errors count: the medians of the repeats are weighted by one over the square of
    what the line says, in turns until both agree. A coefficient that comes out negative is set to 0.

    Parameters
    ----------
    operation, world : of the line.
    sizes : (m,), m ≥ 3, of which two differ.
    seconds : (m, repeats), positive.

    Raises
    ------
    InputError
        For fewer than three sizes, or times that are not positive.
    """
    import statsmodels.api as sm

    x, repeats = np.asarray(sizes, float), np.asarray(seconds, float)
    y = np.median(repeats, axis=1)
    if np.unique(x).size < 3 or not (np.isfinite(y) & (y > 0)).all():
        raise InputError(f"{operation}: a line needs positive times of at least three sizes")
    columns, expected = [0, 1], y
    for _ in range(_ROUNDS):
        design = np.stack([np.ones_like(x), x], axis=1)[:, columns]
        fitted = sm.WLS(y, design, weights=expected**-2.0).fit()
        if min(fitted.params) < 0:
            columns = [c for c, p in zip(columns, fitted.params, strict=True) if p >= 0]
            continue
        before, expected = expected, fitted.fittedvalues
        if np.abs(expected / before - 1).max() < _SIGNIFICANT:
            break
    coefficients, covariance = np.zeros(2), np.zeros((2, 2))
    coefficients[columns] = fitted.params
    covariance[np.ix_(columns, columns)] = fitted.cov_params()
    quartiles = np.quantile(repeats, (0.25, 0.75), axis=1)
    # standard error of a median of normal repeats: 1.253 σ/√n, with σ = interquartile range / 1.349
    error = 1.253 * (quartiles[1] - quartiles[0]) / 1.349 / math.sqrt(repeats.shape[1])
    (a, b), (c, d) = covariance.tolist()
    return Line(
        operation=operation,
        world=world,
        fixed=float(coefficients[0]),
        slope=float(coefficients[1]),
        covariance=((a, b), (c, d)),
        degrees=int(fitted.df_resid),
        spread=math.sqrt(fitted.scale),
        noise=float(np.median(error / y)),
        sizes=tuple(x.tolist()),
        seconds=tuple(y.tolist()),
    )


@dataclass(frozen=True)
class Network:
    """Workers, their links, and what their processors take for selection, packing and unpacking.

    Attributes
    ----------
    lines : what was measured, or assumed.
    algorithms : collective to the algorithm of :data:`ALGORITHMS` by which it scales to other numbers of workers;
        the default one where none is named.
    about : where the numbers come from: world size, backend, device, versions, ratio of the selections, JSON values.

    Notes
    -----
    A number of workers that was measured is taken as measured. For others the line of the nearest measured number is
    scaled: `fixed` with the messages, `slope` with the bytes under way of the algorithm. This presumes that all links
    are alike and that more workers do not share them: it fails where the measured workers sat in one host and the
    others do not, and where switches are oversubscribed.
    """

    lines: tuple[Line, ...]
    algorithms: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_link(
        cls,
        latency: float,
        seconds_per_byte: float,
        local: Mapping[str, float] | None = None,
        algorithms: Mapping[str, str] | None = None,
    ) -> Network:
        """Return a network that is assumed: every message takes α + β · bytes.

        Parameters
        ----------
        latency : α, seconds.
        seconds_per_byte : β; 0.8e-9 for 10 Gbit/s.
        local : local work to γ, seconds per element. What is not named costs nothing.
        algorithms : see :class:`Network`.
        """
        network = cls((), algorithms or {}, {"assumed": True})
        lines = [Line("hop", 2, latency, seconds_per_byte)]
        for operation in ALGORITHMS.keys() - {"hop"}:
            messages, volume = network._terms(operation, 2)
            lines.append(Line(operation, 2, messages * latency, volume * seconds_per_byte))
        lines += [Line(name, 1, 0.0, gamma) for name, gamma in (local or {}).items()]
        return replace(network, lines=tuple(lines))

    def _terms(self, operation: str, world: int) -> tuple[float, float]:
        known = ALGORITHMS[operation]
        name = self.algorithms.get(operation, next(iter(known)))
        if name not in known:
            raise InputError(f"no {operation} by {name!r}; there are {', '.join(known)}")
        return known[name](world)

    def line(self, operation: str, world: int) -> Line:
        """Return the line of an operation among `world` workers, scaled if it was not measured.

        Raises
        ------
        InputError
            If the operation was not measured with any number of workers.
        """
        if operation in ALGORITHMS and world == 1:
            return Line(operation, 1, 0.0, 0.0)
        measured = [line for line in self.lines if line.operation == operation]
        if not measured:
            if self.about.get("assumed"):
                return Line(operation, 1, 0.0, 0.0)
            raise InputError(f"the network was measured without {operation!r}; measure it anew")
        nearest = min(measured, key=lambda line: abs(math.log(line.world / world)))
        if operation not in ALGORITHMS or nearest.world == world:
            return nearest
        there, here = self._terms(operation, nearest.world), self._terms(operation, world)
        a, b = here[0] / there[0], here[1] / there[1]
        (aa, ab), (_, bb) = nearest.covariance
        return replace(
            nearest,
            world=world,
            fixed=nearest.fixed * a,
            slope=nearest.slope * b,
            covariance=((aa * a * a, ab * a * b), (ab * a * b, bb * b * b)),
            sizes=(),
            seconds=(),
        )

    def link(self, operation: str = "all_reduce") -> tuple[Interval, Interval]:
        """Return α, seconds per message, and β, seconds per byte on the wire, that a collective's fit comes to."""
        measured = [line for line in self.lines if line.operation == operation]
        if not measured:
            raise InputError(f"the network was measured without {operation!r}; measure it anew")
        line = max(measured, key=lambda line: line.world)
        messages, volume = self._terms(operation, line.world)
        fixed, slope = line.confidence()
        return (
            Interval(*(x / messages for x in fixed)),
            Interval(*(x / volume for x in slope)),
        )

    def seconds(self, works: Iterable[Work], world: int) -> float:
        """Return what works take one after the other."""
        return sum(w.times * self.line(w.operation, world).at(w.size) for w in works if w.times)

    def slowed(self, factor: float) -> Network:
        """Return the network with `factor` times the seconds per byte in every collective, a bandwidth 1/factor."""
        lines = (
            replace(line, slope=line.slope * factor) if line.operation in ALGORITHMS else line
            for line in self.lines
        )
        return replace(self, lines=tuple(lines))

    def drawn(self, generator: np.random.Generator) -> Network:
        """Return the network as it may be, see :meth:`Line.drawn`."""
        return replace(self, lines=tuple(line.drawn(generator) for line in self.lines))

    def save(self, path: str | Path) -> None:
        """Write JSON.

        Raises
        ------
        InputError
            If the file cannot be written.
        """
        content = {
            "format": _FORMAT,
            "schema": SCHEMA,
            "about": dict(self.about),
            "algorithms": dict(self.algorithms),
            "lines": [asdict(line) for line in self.lines],
        }
        try:
            Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from None

    @classmethod
    def load(cls, path: str | Path) -> Network:
        """Read what :meth:`save` wrote.

        Raises
        ------
        InputError
            If the file is missing, not a network, or of a newer version.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                raise InputError(f"{path} is not a measured network")
            if content["schema"] != SCHEMA:
                raise InputError(
                    f"{path} has network schema {content['schema']}; this gradstats reads {SCHEMA}"
                )
            lines = tuple(Line(**_tuples(line)) for line in content["lines"])
            return cls(lines, content["algorithms"], content["about"])
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path} is not a measured network") from None


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    plain = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}
    return plain | {"covariance": tuple(tuple(row) for row in record["covariance"])}


class Interval(NamedTuple):
    """A prediction, and where it lies with a probability of 95 %."""

    value: float
    low: float
    high: float


def interval(
    network: Network, predict: Callable[[Network], float], draws: int = 200, seed: int = 0
) -> Interval:
    """Return a prediction and its 95 % interval.

    Whatever is predicted, a time, a speed-up, the end of a simulated timeline, is computed anew for networks drawn from
    the distribution of what was fitted. What two predictions have in common varies in common.

    Parameters
    ----------
    network : as fitted.
    predict : network to number.
    draws : of networks.
    seed : of the draws; the same networks are drawn for the same seed.
    """
    generator = np.random.default_rng(seed)
    values = [predict(network.drawn(generator)) for _ in range(draws)]
    # as observed, since infinite ones (a break-even that does not exist) cannot be interpolated
    low, high = np.quantile(values, (0.025, 0.975), method="nearest")
    return Interval(predict(network), float(low), float(high))
