"""A meeting of ranks before something that all of them have to make, such as a capture or a monitor of shards."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gradstats.errors import InputError, warn
from gradstats.hooks.torch_private import store_of

__all__ = ["meet"]

_PATIENCE_S = 5.0
"""Seconds after which a rank that waits for others says so."""

# meetings of a group so far: counted alike on its ranks, they give each of them keys of its own
_meetings: Counter[tuple[str, str]] = Counter()


def meet(
    what: str,
    advice: str,
    group: dist.ProcessGroup | None,
    category: type[Warning] = UserWarning,
) -> None:
    """Wait until all ranks are here, and say soon if some are not: one that never comes leaves the others waiting.

    Parameters
    ----------
    what : str
        What they are making, such as ``"Capture"``.
    advice : str
        What to do if a rank does not come.
    group : torch.distributed.ProcessGroup, optional
        The ranks; the default group if None.
    category : type, optional
        That of the warning of ranks that are late.

    Raises
    ------
    InputError
        If some do not come before the group's timeout.
    """
    world, store = dist.get_world_size(group), store_of(group)
    if world == 1 or store is None or dist.get_backend(group) == "fake":
        return
    members: Any = group or dist.group.WORLD
    name = members.group_name
    key, rank = f"gradstats/{what}/{name}/{_meetings[what, name]}", dist.get_rank(group)
    try:
        # each by its name, so that those who are missing can be told
        store.set(f"{key}/{rank}", "here")
        # the last one to come releases all
        if store.add(f"{key}/ranks", 1) == world:
            store.set(f"{key}/all", "here")
    except (RuntimeError, NotImplementedError):  # a store that keeps nothing, of a simulated group
        return
    began, longest = time.monotonic(), store.timeout.total_seconds()
    # a short wait, for an early warning, and then as long as the group waits for anything
    for seconds in (min(_PATIENCE_S, longest), longest):
        try:
            store.wait([f"{key}/all"], timedelta(seconds=seconds))
            _meetings[what, name] += 1
            return
        except RuntimeError:
            if time.monotonic() - began < seconds / 2:
                return  # no timeout: the ranks have lost each other, which the next exchange says
            absent = [r for r in range(world) if not store.check([f"{key}/{r}"])]
            if not absent:  # the last one came just now
                _meetings[what, name] += 1
                return
        # as the user numbers them: those of the whole training
        ranks = ", ".join(str(dist.get_global_rank(members, r)) for r in absent[:5])
        missing = f"rank {ranks}{' …' if absent[5:] else ''} (of {dist.get_world_size()})"
        if seconds < longest:
            warn(f"a {what} waits for {missing}, to make it too: {advice}", category)
    # taken back: when all come later, it is this meeting that they come to
    with suppress(RuntimeError, NotImplementedError):
        store.add(f"{key}/ranks", -1)
        store.delete_key(f"{key}/{rank}")
    raise InputError(f"a {what} waited {longest:.0f} s in vain for {missing}: {advice}")
