"""Two runs side by side: where they differ, by what factor, and the likely cause; ``gradstats compare``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from gradstats.analysis.causes import Measured, explain
from gradstats.analysis.delta import kinds_of_weights
from gradstats.analysis.over import Spread, shares
from gradstats.analysis.pieces import PIECE, Key, Submit, evaluate
from gradstats.analysis.verdicts import first_difference
from gradstats.errors import InputError
from gradstats.primitives.arrays import as_numpy
from gradstats.primitives.ratio import check_number
from gradstats.tables import Records
from gradstats.trace import Kind, Layer
from gradstats.trace.sources import ArraySource, Source, TraceSource, chosen, open_source

__all__ = ["TOLERANCE", "Comparison", "compare"]

TOLERANCE = 1e-5
"""Relative error up to which two gradients are the same: what another order of float32 sums leaves."""

_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class Comparison(Records):
    """Records of :func:`compare`, and what they say in a sentence.

    Attributes
    ----------
    first : dict or None
        The first gradient, in the order of steps, whose error exceeds the tolerance: step, rank, kind, layer (the first
        such in the order of the model), error, cause. None if there is none.
    unmatched : (list of str, list of str)
        Parameters that only A, and that only B has.
    compared : int
        Number of gradients that were compared, of all steps, ranks and kinds.
    held : (int, int)
        Numbers of those that A and B have, of the steps, ranks and kinds looked at.
    """

    first: dict[str, Any] | None = None
    unmatched: tuple[list[str], list[str]] = ([], [])
    compared: int = 0
    held: tuple[int, int] = (0, 0)

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        return first_difference(self.first, self.unmatched, self.compared, self.held)


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two sources: what is compared of it."""

    source: Source
    places: list[slice]
    keys: dict[tuple[int, Kind], list[Key]]
    held: int
    """Number of its gradients, also those that the other side lacks."""

    def parts(self, key: Key, layers: range) -> Iterator[NDArray[np.floating[Any]]]:
        """Yield some layers of one gradient, read at once where they lie close together."""
        places = [self.places[i] for i in layers]
        first, last = min(p.start for p in places), max(p.stop for p in places)
        # layers far apart would have all between them read, too
        together = last - first <= 2 * PIECE
        whole = as_numpy(self.source.elements(*key, first, last)) if together else None
        for p in places:
            if whole is not None:
                yield whole[p.start - first : p.stop - first]
            else:
                yield as_numpy(self.source.elements(*key, p.start, p.stop))


@shares(Spread)
def compare(
    a: object,
    b: object,
    *,
    weights: object = None,
    tolerance: float = TOLERANCE,
    **over: Unpack[Spread],
) -> Comparison:
    """Compare the gradients of two runs, aligned by parameter name, kind, step and rank, and name the likely cause.

    Parameters
    ----------
    a, b : str, Path, Trace, array_like, mapping of str to array_like, or Source
        Traces or their paths, gradient files, arrays, or arrays by layer name. ``module.`` and the like, which
        wrappers put before names, do not count. A single vector is laid out as the other source's parameters are.
    weights : str, Path, mapping of str to array_like, or Source, optional
        Parameters of the model, such as a file of its ``state_dict``: tells weight decay from its first step on.
    tolerance : float, optional
        Relative error up to which two gradients are the same, in (0, 1).
    **over : Unpack[Spread]
        Gradients and layers to look at, as in :class:`gradstats.analysis.over.Spread`.

    Returns
    -------
    Comparison
        step, rank, kind, layer (``all``: the whole gradient); scale, the ratio of norms ‖b‖ ÷ ‖a‖; cosine; error,
        ‖b − a‖ ÷ ‖a‖; signs, the share of elements of the same sign among those that are not zero in both; cause, empty
        where the error is within the tolerance and sizes are equal. Elements that are not finite are left out of the
        numbers.

    Raises
    ------
    InputError
        If the sources have no parameter, step, kind or rank in common, or an option has a wrong value.
    TraceError
        If a trace holds only sketches.

    Notes
    -----
    By default all steps, ranks and kinds are compared that both have. A file has step 0 of rank 0, and is compared with
    whatever single step is chosen of a trace.

    A cause is a guess that fits: it is named where b follows from a by that cause alone, to the tolerance (or to the
    rounding of the shorter type). Several mistakes at once, and what follows from a difference in later steps, have no
    such name; "not known" is said of what is less than a tenth apart without a cause that fits. A factor of 4 is the
    same whether four ranks or four micro-batches were summed: the world sizes that traces record decide, and the text
    names both where they cannot.

    Examples
    --------
    >>> import numpy as np
    >>> g = np.random.default_rng(0).standard_normal(1000)
    >>> [(r["scale"], r["cause"]) for r in compare({"w": g}, {"w": 8 * g})]
    [(8.0, 'accumulation or world size: B = 8 × A')]
    """
    tolerance = check_number(tolerance, "tolerance", 0, 1)
    names, shapes, sides, unmatched = _aligned(
        open_source(a), open_source(b), {n: over[n] for n in ("steps", "ranks", "kinds")}
    )
    # patterns match the names that both sides have, without the wrappers
    wanted = chosen(names, over["layers"], over["per_layer"], "the two sources")
    decayed = None if weights is None else _weights(open_source(weights), names, sides[0])
    measured = _measure(names, shapes, sides, decayed, over["client"], over["on_progress"])
    # 0 where a source does not record its world size
    worlds = [s.source.trace.world_size if isinstance(s.source, TraceSource) else 0 for s in sides]
    rank = next(iter(measured.values())).ranks[0]
    worlds += [n for side in sides for n in _inside(side.source, rank)]
    comparison = Comparison()
    comparison.unmatched = unmatched
    comparison.compared = sum(len(one.ranks) for one in measured.values())
    comparison.held = sides[0].held, sides[1].held
    for (step, kind, rank), causes in explain(measured, worlds, tolerance).items():
        one = measured[step, kind]
        at = one.ranks.index(rank)
        # all layers are explained, also those not shown: the cause of the whole follows from them
        for layer in ("all", *names):
            record: dict[str, Any] = {"step": step, "rank": rank, "kind": kind, "layer": layer}
            record |= one.numbers(layer, at) | {"cause": causes[layer]}
            if layer == "all" or layer in wanted:
                comparison.append(record)
            if comparison.first is None and layer != "all" and causes[layer]:
                # what explains the whole is said of its first layer, too
                comparison.first = record | {"cause": causes["all"] or causes[layer]}
    return comparison


def _plain_names(several: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the names of the parameters of several sources without the parts that wrappers put into them."""
    split = [[name.split(".") for name in names] for names in several]
    # wherever in the name: wrappers nest, and each puts its part before what it wraps
    plain = [
        [".".join([*(p for p in parts[:-1] if p not in _WRAPPERS), parts[-1]]) for parts in names]
        for names in split
    ]
    if all(len(set(names)) == len(names) for names in plain):
        return plain
    # a model may have a module of that name: then only what is before all names is a wrapper's
    for names in split:
        while len({parts[0] for parts in names}) == 1 and names[0][0] in _WRAPPERS:
            if min(map(len, names)) == 1:
                break
            for parts in names:
                del parts[0]
    return [[".".join(parts) for parts in names] for names in split]


def _inside(source: Source, rank: int) -> list[int]:
    """Return how many ranks hold the shards of one model, and how many such models were trained."""
    if not isinstance(source, TraceSource):
        return []
    sharing = len(source.trace.shard_ranks(rank))
    replicas = source.trace.world_size // sharing
    return [sharing, replicas] if min(sharing, replicas) > 1 else []


def _aligned(
    a: Source, b: Source, subset: dict[str, Any]
) -> tuple[list[str], list[tuple[int, ...]], tuple[_Side, _Side], tuple[list[str], list[str]]]:
    """Return the common parameters with their shapes, the two sides, and the names that only one of them has."""
    layouts = [list(s.layers) for s in (a, b)]
    for i, j in ((0, 1), (1, 0)):
        total = sum(layer.numel for layer in layouts[j])
        if len(layouts[i]) == 1 < len(layouts[j]) and layouts[i][0].numel == total:
            layouts[i] = layouts[j]  # a flat vector of the other's parameters
    if len(layouts[0]) == len(layouts[1]) == 1:
        # two single arrays are compared whatever they are called
        layouts[1] = [Layer(layouts[0][0].name, 0, layouts[1][0].shape)]
    plain = _plain_names([[layer.name for layer in layout] for layout in layouts])
    tables = [dict(zip(p, layout, strict=True)) for p, layout in zip(plain, layouts, strict=True)]
    names = [name for name in tables[0] if name in tables[1]]
    unmatched = tuple([n for n in tables[i] if n not in tables[1 - i]] for i in (0, 1))
    if not names:
        one, other = (", ".join(list(t)[:3]) for t in tables)
        raise InputError(
            f"{a.name} and {b.name} have no parameter in common: {one}, … and {other}, …; rename them, or compare "
            "flat vectors of equal length"
        )
    keys = [_keys(s, subset) for s in (a, b)]
    common = [key for key in keys[0] if key in keys[1]]
    # the step of a file has no meaning
    if not common or isinstance(a, ArraySource) != isinstance(b, ArraySource):
        single = all(len({step for step, _ in k}) == 1 for k in keys)
        if not single or not {k for _, k in keys[0]} & {k for _, k in keys[1]}:
            held = " and ".join(
                f"{s.name} has {', '.join(f'{kind} of step {step}' for step, kind in list(k)[:3])}"
                f"{', …' if len(k) > 3 else ''}"
                for s, k in zip((a, b), keys, strict=True)
            )
            raise InputError(f"nothing to compare: {held}; choose one step of a trace for a file")
        # a file's gradient, or another run's, beside the only step chosen of a trace
        step = next(iter(keys[isinstance(a, ArraySource)]))[0]
        keys = [{(step, kind): v for (_, kind), v in k.items()} for k in keys]
        common = [key for key in keys[0] if key in keys[1]]
    # in the order of steps: causes look at the step before
    sides = tuple(
        _Side(
            s,
            [table[n].slice for n in names],
            {key: k[key] for key in sorted(common)},
            sum(map(len, k.values())),
        )
        for s, table, k in zip((a, b), tables, keys, strict=True)
    )
    # parameters in A's order, with A's shapes
    return names, [tables[0][n].shape for n in names], sides, unmatched  # type: ignore[return-value]


def _keys(source: Source, subset: dict[str, Any]) -> dict[tuple[int, Kind], list[Key]]:
    """Return the gradients of a source by step and kind, ranks in order; of a file the only one, whatever is chosen."""
    # a file has one gradient, of step 0 by default, which no choice of a trace's steps is about
    chosen = dict.fromkeys(subset) if isinstance(source, ArraySource) else subset
    keys: dict[tuple[int, Kind], list[Key]] = {}
    for key in sorted(source.select(**chosen)):
        keys.setdefault((key[2], key[1]), []).append(key)
    return keys


def _weights(source: Source, names: Sequence[str], side: _Side) -> list[NDArray[np.floating[Any]]]:
    """Return the model's parameters, zeros where the file lacks one."""
    wanted, plain = _plain_names([names, [layer.name for layer in source.layers]])
    places = dict(zip(plain, source.layers, strict=True))
    key = source.select(kinds=kinds_of_weights(source))[0]
    weights = []
    for name, place in zip(wanted, side.places, strict=True):
        # what the file lacks is zero: it explains no difference
        values = np.zeros(place.stop - place.start)
        if name in places and places[name].numel == values.size:
            where = places[name].slice
            values = as_numpy(source.elements(*key, where.start, where.stop)).reshape(-1)
        weights.append(values)
    if not any(v.any() for v in weights):
        raise InputError(f"{source.name} has none of the parameters {', '.join(names[:3])}, …")
    return weights


def _groups(places: Sequence[slice]) -> Iterator[range]:
    """Yield consecutive layers of at most PIECE elements together."""
    first, size = 0, 0
    for i, place in enumerate(places):
        numel = place.stop - place.start
        # a layer larger than a piece is a piece of its own
        if size + numel > PIECE and i > first:
            yield range(first, i)
            first, size = i, 0
        size += numel
    yield range(first, len(places))


def _measure(
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    sides: tuple[_Side, _Side],
    weights: list[NDArray[np.floating[Any]]] | None,
    client: Any,
    on_progress: Callable[[], None],
) -> dict[tuple[int, Kind], Measured]:
    """Reduce every step of each kind to sums, layer by layer."""
    sums = _unmeasured(sides)

    def plan(submit: Submit, group: range) -> Any:
        of_group = None if weights is None else [weights[i] for i in group]
        some = slice(group.start, group.stop)
        # a group's share, as a task's arguments travel to its worker
        return submit(_measure_group, names[some], shapes[some], sides, of_group, group)

    for parts in evaluate(plan, _groups(sides[0].places), client, "groups of layers"):
        # groups come in the model's order, so layers stay in it
        for at, part in parts.items():
            sums[at].join(part)
        on_progress()
    return sums


def _unmeasured(sides: tuple[_Side, _Side]) -> dict[tuple[int, Kind], Measured]:
    return {
        (step, kind): Measured.of(*([key[0] for key in s.keys[step, kind]] for s in sides))
        for step, kind in sides[0].keys
    }


def _measure_group(
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    sides: tuple[_Side, _Side],
    weights: list[NDArray[np.floating[Any]]] | None,
    group: range,
) -> dict[tuple[int, Kind], Measured]:
    """Measure some layers in every step: the only place where elements are read."""
    sums = _unmeasured(sides)
    last: dict[Kind, tuple[Any, list[list[NDArray[np.floating[Any]]]]]] = {}
    for (step, kind), one in sums.items():
        vectors = [list(s.parts(key, group)) for s in sides for key in s.keys[step, kind]]
        ranks, earlier = last.get(kind, (None, []))
        # of other ranks the vectors of the step before are in other places
        if ranks != one.numbers_of_ranks:
            earlier = []
        for i, (name, shape) in enumerate(zip(names, shapes, strict=True)):
            here = [v[i] for v in vectors]
            before = [v[i] for v in earlier]
            one.add(name, shape, here, before, None if weights is None else weights[i])
        # the step before shows what is stale or was accumulated
        last[kind] = one.numbers_of_ranks, vectors
    return sums
