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
ALGORITHMS["busy_all_gather"] = ALGORITHMS["all_gather"]
"""By collective and algorithm: number of workers to (messages one after the other, bytes under way one after the other
per byte of the argument), of which the first multiply α and the second β. The first algorithm of each is the default.
``busy_all_gather`` is one beside which every rank computes, with as many threads as in training.

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
    """Seconds of an operation: fixed + slope · size, fitted to a sweep of sizes, times how it bends there.

    Caches, page faults and protocols bend what is not quite a line. Within the sweep the measured medians are kept as
    multiples of the line, and interpolated; beyond its ends the last one stays.

    Attributes
    ----------
    operation : a collective, its size in bytes; or local work, its size in elements.
    world : workers it was measured with; of local work the workers whose messages it was done on, 1 for one's own.
    fixed : seconds however small, α times the messages.
    slope : seconds per byte or element, β or γ.
    covariance : of (fixed, slope), 2 × 2.
    degrees : of freedom of the fit; 0 for a line that is assumed.
    spread : standard deviation of the measurements about the line, relative.
    noise : median standard error of a measurement, relative. A spread far above it is the line's fault, not the
        noise's: it bends.
    sizes, seconds : the sweep, medians.
    bends : measured over the line, by size; empty for a line that is assumed.
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
    bends: tuple[float, ...] = ()

    def at(self, size: float) -> float:
        """Return the seconds of one call."""
        return (self.fixed + self.slope * size) * self.bend(size)

    def bend(self, size: float) -> float:
        """Return by how much a call takes longer than the line says: log-linear between the sizes measured."""
        if not self.bends:
            return 1.0
        logs = np.log([max(size, 1.0), *self.sizes]), np.log(self.bends)
        return float(np.exp(np.interp(logs[0][0], logs[0][1:], logs[1])))

    @property
    def error(self) -> float:
        """Relative standard error of :meth:`at`: noise, and how well neighbours foretell a size between them."""
        if len(self.bends) < 3:
            return self.spread
        x, y = np.log(self.sizes), np.log(self.bends)
        foretold = y[:-2] + (y[2:] - y[:-2]) * (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
        # half as far from a measured size as the neighbours of one are, and off by a quarter of what a curve is there
        return math.hypot(self.noise, float(np.sqrt(np.mean((y[1:-1] - foretold) ** 2))) / 4)

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
        """Return a line as it may be: off by its error altogether."""
        if not self.degrees:
            return self
        # t-distributed: the error is itself an estimate
        scale = math.sqrt(self.degrees / generator.chisquare(self.degrees))
        factor = math.exp(self.error * generator.standard_normal() * scale)
        return replace(self, fixed=self.fixed * factor, slope=self.slope * factor)


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
        bends=tuple((y / (coefficients[0] + coefficients[1] * x)).tolist()),
    )


@dataclass(frozen=True)
class Network:
    """Workers, their links, and what their processors take for selection, packing and unpacking.

    Attributes
    ----------
    lines : what was measured, or assumed.
    algorithms : collective to the algorithm of :data:`ALGORITHMS` by which it scales to other numbers of workers;
        the default one where none is named.
    about : where the numbers come from: world size, backend, device, versions, ratio of the selections, rate in bit/s
        if links were shaped; JSON values.

    Notes
    -----
    A number of workers that was measured is taken as measured. For others the line of the nearest measured number is
    scaled: `fixed` with the messages, `slope` with the bytes under way of the algorithm. This presumes that all links
    are alike and that more workers do not share them: it fails where the measured workers sat in one host and the
    others do not, and where switches are oversubscribed. Local work on many workers' messages grows in proportion.
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
        if nearest.world == world or (operation not in ALGORITHMS and nearest.world == 1):
            return nearest
        a = b = world / nearest.world  # local work on what that many workers sent
        if operation in ALGORITHMS:
            there, here = self._terms(operation, nearest.world), self._terms(operation, world)
            a, b = here[0] / there[0], here[1] / there[1]
        (aa, ab), (_, bb) = nearest.covariance
        return replace(
            nearest,
            world=world,
            fixed=nearest.fixed * a,
            slope=nearest.slope * b,
            covariance=((aa * a * a, ab * a * b), (ab * a * b, bb * b * b)),
            seconds=(),
        )

    def link(self, operation: str = "all_reduce") -> tuple[Interval, Interval]:
        """Return α, seconds per message, and β, seconds per byte on the wire, that a collective's fit comes to.

        β is that of large messages: where a line bends, at the end of the sweep.
        """
        measured = [line for line in self.lines if line.operation == operation]
        if not measured:
            raise InputError(f"the network was measured without {operation!r}; measure it anew")
        line = max(measured, key=lambda line: line.world)
        messages, volume = self._terms(operation, line.world)
        fixed, slope = line.confidence()
        bend = line.bends[-1] if line.bends else 1.0
        return (
            Interval(*(x / messages for x in fixed)),
            Interval(*(x * bend / volume for x in slope)),
        )

    @property
    def crowded(self) -> bool:
        """Whether no core is left for a thread that exchanges while the others compute; False where that is unknown."""
        needed = self.about.get("ranks_per_host", 0) * (self.about.get("threads", 1) + 1)
        return self.about.get("device") == "cpu" and needed > self.about.get("cores", math.inf)

    @property
    def rate(self) -> float:
        """Bandwidth of a link in bit/s: what it was shaped to where that is known, else what large all-reduces get."""
        return float(self.about.get("rate") or 8 / self.link()[1].value)

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
    if plain.get("seconds") and "bends" not in plain:  # schema 1 as first written
        plain["bends"] = tuple(
            s / (plain["fixed"] + plain["slope"] * size)
            for size, s in zip(plain["sizes"], plain["seconds"], strict=True)
        )
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
