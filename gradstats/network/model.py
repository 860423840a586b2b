"""The cost of communication and local work: lines fitted to measurements, scaled to any number of workers."""

# Size: two fifths of its lines are docstrings; lines are fitted, drawn and evaluated by the same formula.

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from gradstats.compressors.cost import Work
from gradstats.errors import InputError
from gradstats.files import replace_file

__all__ = [
    "ALGORITHMS",
    "Interval",
    "Line",
    "Network",
    "fit_line",
    "interval",
    "middle_95",
]

_FORMAT = "gradstats-network"
_LONGEST_PATH = 400
"""Characters of a path beyond which it is none that somebody gave on purpose."""
SCHEMA = 1
_ROUNDS = 20
_SIGNIFICANT = 1e-6
"""Relative change of a fitted line below which reweighting it stops; :data:`_ROUNDS` is the most it is reweighted."""
_LOW, _HIGH = 0.025, 0.975
"""Quantiles between which 95 % lie."""


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
"""Cost of a collective by its algorithm, as a function of the number of workers.

The function returns two numbers: the messages sent one after the other, which multiply α, and the bytes that travel one
after the other per byte of the argument, which multiply β. The argument is the whole vector in an all-reduce,
reduce-scatter or broadcast, and one rank's message in an all-gather or a hop. In a hop every rank sends to the next one
and receives from the one before. ``busy_all_gather`` is an all-gather during which every rank computes with as many
threads as in training. The first algorithm of each collective is the default.
"""


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of an operation: fixed + slope · size, times the factor by which measurements bend away from the line.

    Caches, page faults and protocols bend what is nearly a line. The measured medians are kept as multiples of the
    line. Between the sizes of the sweep these factors are interpolated; beyond its ends the last one holds.

    Attributes
    ----------
    operation : str
        A collective, whose size is in bytes, or local work, whose size is in elements.
    world : int
        Number of workers it was measured with. For local work, the number of workers whose messages it was done on; 1
        if a rank works on its own data.
    fixed : float
        Seconds of the smallest call: α times the messages.
    slope : float
        Seconds per byte or element: β or γ.
    covariance : tuple of tuple of float, shape (2, 2)
        Covariance of fixed and slope.
    degrees : int
        Degrees of freedom of the fit; 0 for a line that is assumed.
    spread : float
        Relative standard deviation of the measurements about the line.
    noise : float
        Median relative standard error of a measurement. If the spread is far above it, the cause is not noise: the
        measurements bend.
    sizes : tuple of float
        Sizes of the sweep.
    seconds : tuple of float
        Median seconds of each size.
    bends : tuple of float
        Measurement divided by line for each size; empty for a line that is assumed.
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
        """Return the seconds of one call.

        Parameters
        ----------
        size : float
            Bytes of a collective, elements of local work.
        """
        return (self.fixed + self.slope * size) * self.bend(size)

    def bend(self, size: float) -> float:
        """Return how many times as long as the line says a call takes.

        The factor is interpolated between the measured sizes, both on logarithmic scales.

        Parameters
        ----------
        size : float
            Bytes of a collective, elements of local work.
        """
        return _bend(size, self.sizes, self.bends) if self.bends else 1.0

    @property
    def error(self) -> float:
        """Relative standard error of :meth:`at`: noise, and the error of interpolating between measured sizes."""
        # interpolation is judged by sizes that lie between two others
        if len(self.bends) < 3:
            return self.spread
        return math.hypot(self.noise, _interpolating(self.sizes, self.bends))

    def confidence(self) -> tuple[Interval, Interval]:
        """Return 95 % intervals of `fixed` and `slope`, cut at zero."""
        from scipy.stats import t

        width = t.ppf(_HIGH, self.degrees) if self.degrees else 0.0
        error = np.sqrt(np.diag(self.covariance)) * width
        fixed, slope = (
            Interval(value, max(0.0, value - float(e)), value + float(e))
            for value, e in zip((self.fixed, self.slope), error, strict=True)
        )
        return fixed, slope

    def drawn(self, generator: np.random.Generator) -> Line:
        """Return a line as it may really be: all its seconds multiplied by one random error.

        Parameters
        ----------
        generator : numpy.random.Generator
            Source of randomness. A line that is assumed does not use it.
        """
        if not self.degrees:
            return self
        # t-distributed: the error is itself an estimate
        scale = math.sqrt(self.degrees / generator.chisquare(self.degrees))
        # of few repeats on a busy machine t's tails reach beyond what a float holds: e¹⁰⁰ times as slow is never, too
        factor = math.exp(min(self.error * generator.standard_normal() * scale, 100))
        return replace(self, fixed=self.fixed * factor, slope=self.slope * factor)


@lru_cache(1 << 12)
def _bend(size: float, sizes: tuple[float, ...], bends: tuple[float, ...]) -> float:
    """Return what :meth:`Line.bend` does; kept, as all lines that are drawn for an interval bend alike."""
    # the logarithm of an empty message would be infinite
    logs = np.log([max(size, 1.0), *sizes]), np.log(bends)
    return float(np.exp(np.interp(logs[0][0], logs[0][1:], logs[1])))


@cache
def _interpolating(sizes: tuple[float, ...], bends: tuple[float, ...]) -> float:
    """Return the relative error between measured sizes; kept, as an interval draws a line thousands of times."""
    x, y = np.log(sizes), np.log(bends)
    foretold = y[:-2] + (y[2:] - y[:-2]) * (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
    # Predicting each size from its neighbours interpolates over two steps. Between neighbours it is one step, and
    # the error of an interpolated curve grows with the square of the step: a quarter of it.
    return float(np.sqrt(np.mean((y[1:-1] - foretold) ** 2))) / 4


def fit_line(
    operation: str, world: int, sizes: Sequence[float], seconds: Sequence[Sequence[float]]
) -> Line:
    """Fit seconds = fixed + slope · size by weighted least squares.

    Sizes run over decades, so relative errors count. The medians of the repeats are weighted by one over the square of
    what the line says; weights and line are computed in turns until they agree. A coefficient that comes out negative
    is set to 0.

    Parameters
    ----------
    operation : str
        Name of the operation.
    world : int
        Number of workers it was measured with.
    sizes : sequence of float, length m
        Sizes of the calls, at least three different ones.
    seconds : sequence of sequence of float, shape (m, repeats)
        Measured seconds, all positive.

    Returns
    -------
    Line
        The fitted line with its errors and bends.

    Raises
    ------
    InputError
        If there are fewer than three sizes, or a median is not positive.
    """
    import statsmodels.api as sm

    x, repeats = np.asarray(sizes, float), np.asarray(seconds, float)
    # the median: a repeat that the system interrupted should not move a line
    y = np.median(repeats, axis=1)
    if np.unique(x).size < 3 or not (np.isfinite(y) & (y > 0)).all():
        raise InputError(f"{operation}: a line needs positive times of at least three sizes")
    # the first weights come from the measured times themselves
    columns, expected = [0, 1], y
    for _ in range(_ROUNDS):
        design = np.stack([np.ones_like(x), x], axis=1)[:, columns]
        fitted = sm.WLS(y, design, weights=expected**-2.0).fit()
        if min(fitted.params) < 0:
            # no time is negative: refitted without that term, with the same weights
            columns = [c for c, p in zip(columns, fitted.params, strict=True) if p >= 0]
            continue
        before, expected = expected, fitted.fittedvalues
        # relative, so that microseconds and seconds have the same tolerance
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
        # with weights 1/ŷ² the scale of the residuals is the square of a relative deviation
        spread=math.sqrt(fitted.scale),
        noise=float(np.median(error / y)),
        sizes=tuple(x.tolist()),
        seconds=tuple(y.tolist()),
        bends=tuple((y / (coefficients[0] + coefficients[1] * x)).tolist()),
    )


# Size: half of its lines are docstrings; every time that a plan needs is asked of it.
@dataclass(frozen=True)
class Network:
    """Cost model of a cluster: its links, and the local work of selection, packing and unpacking.

    Attributes
    ----------
    lines : tuple of Line
        Operations that were measured or assumed.
    algorithms : mapping of str to str
        Algorithm of :data:`ALGORITHMS` by which each collective scales to other numbers of workers. A collective that
        is not named uses its default.
    about : mapping of str to object
        Origin of the numbers, as JSON values: world size, backend, device, versions, ratio of the selections, and the
        rate in bit/s if the links were shaped.

    Notes
    -----
    A number of workers that was measured is used as measured. For any other the line of the nearest measured number is
    scaled by the algorithm: `fixed` with its messages, `slope` with its bytes. This presumes that all links are alike
    and that more workers do not share them. It fails where the measured workers sat in one host and the others do not,
    and where switches are oversubscribed. Local work on many workers' messages grows in proportion to their number.
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
        """Return an assumed network, in which every message takes α + β · bytes.

        Parameters
        ----------
        latency : float
            Seconds of a message, α.
        seconds_per_byte : float
            Seconds per byte, β; 0.8e-9 for 10 Gbit/s.
        local : mapping of str to float, optional
            Seconds per element, γ, by name of the local work. Work that is not named costs nothing.
        algorithms : mapping of str to str, optional
            Algorithm by collective, see :class:`Network`.

        Returns
        -------
        Network
            Network whose lines have no error.

        Raises
        ------
        InputError
            If there is no such algorithm.
        """
        network = cls((), algorithms or {}, {"assumed": True})
        # every line is for two workers; Network.line scales it to any number
        lines = [Line("hop", 2, latency, seconds_per_byte)]
        for operation in [name for name in ALGORITHMS if name != "hop"]:
            messages, volume = network._terms(operation, 2)
            lines.append(Line(operation, 2, messages * latency, volume * seconds_per_byte))
        lines += [Line(name, 1, 0.0, gamma) for name, gamma in (local or {}).items()]
        return replace(network, lines=tuple(lines))

    def _terms(self, operation: str, world: int) -> tuple[float, float]:
        known = ALGORITHMS[operation]
        name = self.algorithms.get(operation, next(iter(known)))
        if name not in known:
            raise InputError(f"no {operation} by {name!r}; choose {' or '.join(known)}")
        return known[name](world)

    def line(self, operation: str, world: int) -> Line:
        """Return the line of an operation among `world` workers, scaled if it was not measured.

        Parameters
        ----------
        operation : str
            A collective of :data:`ALGORITHMS`, or local work.
        world : int
            Number of workers.

        Returns
        -------
        Line
            The measured line, or one scaled from the nearest number of workers.

        Raises
        ------
        InputError
            If the operation was not measured with any number of workers.
        """
        line = self._lines.get((operation, world))
        if line is None:
            line = self._lines[operation, world] = self._line(operation, world)
        return line

    @cached_property
    def _lines(self) -> dict[tuple[str, int], Line]:
        """Lines that were asked for: a plan asks for each of them thousands of times."""
        return {}

    def _line(self, operation: str, world: int) -> Line:
        # a worker alone sends nothing
        if operation in ALGORITHMS and world == 1:
            return Line(operation, 1, 0.0, 0.0)
        measured = [line for line in self.lines if line.operation == operation]
        if not measured:
            if self.about.get("assumed"):
                # in an assumed network, work that is not named costs nothing
                return Line(operation, 1, 0.0, 0.0)
            raise InputError(f"the network was measured without {operation!r}; measure it again")
        # nearest by quotient, which is what lines are scaled by
        nearest = min(measured, key=lambda line: abs(math.log(line.world / world)))
        # work on a rank's own data is the same among any number of workers
        if nearest.world == world or (operation not in ALGORITHMS and nearest.world == 1):
            return nearest
        a = b = world / nearest.world  # local work grows with the number of messages
        if operation in ALGORITHMS:
            there, here = self._terms(operation, nearest.world), self._terms(operation, world)
            a, b = here[0] / there[0], here[1] / there[1]
        # cov(ax, by) = ab cov(x, y)
        (aa, ab), (_, bb) = nearest.covariance
        return replace(
            nearest,
            world=world,
            fixed=nearest.fixed * a,
            slope=nearest.slope * b,
            covariance=((aa * a * a, ab * a * b), (ab * a * b, bb * b * b)),
            seconds=(),  # not measured with so many workers
        )

    def knows(self, operations: Iterable[str]) -> bool:
        """Return whether all of some operations were measured or assumed.

        Parameters
        ----------
        operations : iterable of str
            Names of operations.
        """
        return {line.operation for line in self.lines}.issuperset(operations)

    def link(self, operation: str = "all_reduce") -> tuple[Interval, Interval]:
        """Return α, seconds per message, and β, seconds per byte on the wire, from the fit of a collective.

        β is that of large messages: where the line bends, it is taken at the end of the sweep.

        Parameters
        ----------
        operation : str
            A collective of :data:`ALGORITHMS`.

        Returns
        -------
        tuple of Interval
            α and β, each with its 95 % interval.

        Raises
        ------
        InputError
            If the operation was not measured.
        """
        measured = [line for line in self.lines if line.operation == operation]
        if not measured:
            raise InputError(f"the network was measured without {operation!r}; measure it again")
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
        """Whether a host has no core left for the thread that exchanges while the others compute; False if unknown."""
        needed = (self.about.get("ranks_per_host") or 0) * ((self.about.get("threads") or 1) + 1)
        # Python does not know the cores of every machine
        cores = self.about.get("cores") or math.inf
        return self.about.get("device") == "cpu" and needed > cores

    @property
    def rate(self) -> float:
        """Bandwidth of a link in bit/s: the rate it was shaped to if known, else what large all-reduces reach."""
        return float(self.about.get("rate") or 8 / self.link()[1].value)

    def seconds(self, works: Iterable[Work], world: int) -> float:
        """Return the seconds of some work, done one after the other.

        Parameters
        ----------
        works : iterable of Work
            Calls to add up.
        world : int
            Number of workers.
        """
        return sum(w.times * self.line(w.operation, world).at(w.size) for w in works if w.times)

    def slowed(self, factor: float) -> Network:
        """Return the network with slower links: more seconds per byte in every collective, latencies unchanged.

        Parameters
        ----------
        factor : float
            Factor on the seconds per byte; the bandwidth is divided by it.
        """
        lines = (
            # local work does not use the links
            replace(line, slope=line.slope * factor) if line.operation in ALGORITHMS else line
            for line in self.lines
        )
        return replace(self, lines=tuple(lines))

    def drawn(self, generator: np.random.Generator) -> Network:
        """Return the network as it may really be, see :meth:`Line.drawn`.

        Parameters
        ----------
        generator : numpy.random.Generator
            Source of randomness.
        """
        doubt = self.about.get("doubt")
        if not doubt:
            return replace(self, lines=tuple(line.drawn(generator) for line in self.lines))
        # every message of an assumed link is as slow as the others
        # one factor for all latencies and one for all bandwidths, each of a log-normal law
        latency, slower = np.exp(np.multiply(doubt, generator.standard_normal(2))).tolist()
        lines = (
            replace(line, fixed=latency * line.fixed, slope=slower * line.slope)
            if line.operation in ALGORITHMS
            else line.drawn(generator)
            for line in self.lines
        )
        return replace(self, lines=tuple(lines))

    def save(self, path: str | Path) -> None:
        """Write the network to a JSON file.

        Parameters
        ----------
        path : str or Path
            File to write.

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
            replace_file(path, json.dumps(content, indent=1) + "\n")
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from None

    @classmethod
    def load(cls, path: str | Path) -> Network:
        """Read a network that :meth:`save` wrote.

        Parameters
        ----------
        path : str or Path
            JSON file.

        Raises
        ------
        InputError
            If the file is missing, is not a network, or has another schema.
        """
        if len(str(path)) > _LONGEST_PATH or not str(path).isprintable():  # errors repeat it
            raise InputError(f"no measured network has such a name: {str(path)[:80]!r}")
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                raise InputError(f"{path} is not a measured network")
            if content["schema"] != SCHEMA:
                raise InputError(
                    f"{path} has network schema {content['schema']}; this gradstats reads {SCHEMA}"
                )
            if not isinstance(content["about"], dict):
                raise ValueError("its description is no object")
            lines = tuple(Line(**_tuples(line)) for line in content["lines"])
            # of an assumed link: standard deviations of ln α and ln β
            doubt = content["about"].get("doubt", [0.0, 0.0])
            # with these, too, predictions compute; None where unknown
            names = ("ranks_per_host", "threads", "cores", "rate", "up", "down")
            numbers = [n for n in map(content["about"].get, names) if n is not None]
            if not all(type(n) in (int, float) and 0 < n < math.inf for n in numbers):
                raise ValueError("its description has what is no number")
            if (
                not all(map(_sound, lines))
                or len(doubt) != 2
                or not all(0 <= d < _MOST_DOUBT for d in doubt)
            ):
                raise ValueError("numbers that no measurement gives")
            return cls(lines, dict(content["algorithms"]), dict(content["about"]))
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        except (
            *(ValueError, KeyError, TypeError, AttributeError),
            *(OverflowError, RecursionError),
        ) as error:
            # which is a ValueError as well
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path} is not a measured network") from None


_MOST_DOUBT = 10.0
"""Standard deviations of the logarithm that no link has."""
_MOST = 1e18
"""Bytes, seconds or ranks that nothing measured reaches: what is computed of more leaves the range of numbers."""


def _sound(line: Line) -> bool:
    """Return whether a line's numbers can have been measured: what depends on it divides and takes logarithms."""
    positive = (line.world, *line.sizes, *line.seconds, *line.bends)
    curve = (len(line.sizes), len(line.seconds))
    return (
        isinstance(line.operation, str)
        and isinstance(line.world, int)
        # a collective of one worker has no messages or bytes to scale from
        and (line.world > 1 or line.operation not in ALGORITHMS)
        and isinstance(line.degrees, int)
        and np.shape(line.covariance) == (2, 2)
        and all(0 < number < _MOST for number in positive)
        and all(abs(n) < _MOST for n in (line.fixed, line.slope, line.spread, line.noise))
        and bool(np.isfinite(line.covariance).all())
        and curve == (len(line.bends),) * 2
        # np.interp needs ascending sizes, and does not check them
        and list(line.sizes) == sorted(line.sizes)
    )


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    plain = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}
    if plain.get("seconds") and "bends" not in plain:  # the first files of schema 1
        plain["bends"] = tuple(
            s / (plain["fixed"] + plain["slope"] * size)
            for size, s in zip(plain["sizes"], plain["seconds"], strict=True)
        )
    return plain | {"covariance": tuple(tuple(row) for row in record["covariance"])}


class Interval(NamedTuple):
    """A prediction and its 95 % interval.

    Attributes
    ----------
    value : float
        The prediction.
    low : float
        Lower end of the interval.
    high : float
        Upper end of the interval.
    """

    value: float
    low: float
    high: float


def middle_95(
    values: ArrayLike, *, method: Literal["linear", "nearest"] = "linear"
) -> tuple[float, float]:
    """Return the limits of the middle 95 % of some values.

    Parameters
    ----------
    values : array_like of float
        Predictions for networks drawn at random.
    method : {"linear", "nearest"}
        Whether to interpolate between neighbouring values or to take the nearest one.
    """
    low, high = np.quantile(np.asarray(values), (_LOW, _HIGH), method=method)
    return float(low), float(high)


def interval(
    network: Network, predict: Callable[[Network], float], draws: int = 200, seed: int = 0
) -> Interval:
    """Return a prediction and its 95 % interval.

    The prediction may be a time, a speed-up, the end of a simulated timeline, or any other number. It is computed again
    for networks drawn from the distribution of the fit, so that what two quantities share varies in common.

    Parameters
    ----------
    network : Network
        Fitted network.
    predict : callable
        Function from a network to the predicted number.
    draws : int
        How many networks are drawn.
    seed : int
        Seed of the draws. The same seed draws the same networks.

    Returns
    -------
    Interval
        The prediction for the network as fitted, and the limits of the middle 95 % of the draws.
    """
    generator = np.random.default_rng(seed)
    values = [predict(network.drawn(generator)) for _ in range(draws)]
    # A break-even bandwidth may be infinite, and infinite values cannot be interpolated.
    low, high = middle_95(values, method="nearest")
    return Interval(predict(network), low, high)
