"""Checkpoints of a reference run: one that is stopped goes on where it was, with the numbers it would have had."""

from __future__ import annotations

import contextlib
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from capture.workloads.config import RunConfig, RunResult
from gradstats.errors import InputError, first_line
from gradstats.files import replacing

__all__ = ["Checkpoint", "result_so_far"]

_NAME = re.compile(r"step(\d+)-rank(\d+)\.pt")


def result_so_far(folder: Path) -> tuple[int, RunResult] | None:
    """Return the number of steps that a run has made and its result until then; None if it has no checkpoint yet.

    Parameters
    ----------
    folder : Path
        Its :attr:`RunConfig.checkpoint`.
    """
    steps = _steps(folder, 0)
    if not steps:
        return None
    content = _read(_file(folder, steps[-1], 0))
    return steps[-1], RunResult(**content["result"])


class Checkpoint:
    """What a rank needs to go on: model, optimizers, compressor and memory, random numbers, and the result so far.

    Parameters
    ----------
    config : RunConfig
        Settings of the run, checked.
    model : torch.nn.Module
        Model that is trained.
    states : list of object
        Optimizers, the hook's state, what the data carry along: what has ``state_dict`` and ``load_state_dict``.
    result : RunResult
        The rank's result, which is restored in place.
    """

    def __init__(
        self, config: RunConfig, model: nn.Module, states: list[Any], result: RunResult
    ) -> None:
        assert config.checkpoint is not None
        self._folder, self._settings = config.checkpoint, config.metadata()
        self._model, self._states, self._result = model, states, result

    def load(self) -> int:
        """Restore the newest step that all ranks have saved, and return how many steps were made; 0 if there is none.

        Raises
        ------
        InputError
            If the folder holds the checkpoints of a run with other settings, or a damaged one.
        """
        every: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, _steps(self._folder, dist.get_rank()))
        # a rank may have been stopped before it saved: the step must be there on all
        common = set.intersection(*map(set, every))
        if not common:
            return 0
        step = max(common)
        content = _read(_file(self._folder, step, dist.get_rank()))
        if content["settings"] != self._settings:
            raise InputError(
                f"{self._folder} holds a run with other settings: name another folder, or remove it"
            )
        self._model.load_state_dict(content["model"])
        for state, saved in zip(self._states, content["states"], strict=True):
            state.load_state_dict(saved)
        # after the model and the optimizers are there: making them takes random numbers
        torch.set_rng_state(content["random"])
        for name, value in content["result"].items():
            setattr(self._result, name, value)
        return step

    def save(self, step: int) -> None:
        """Save a checkpoint, and remove older ones when all ranks have theirs.

        Parameters
        ----------
        step : int
            Number of steps made.
        """
        rank = dist.get_rank()
        self._folder.mkdir(parents=True, exist_ok=True)
        content = {
            "settings": self._settings,
            "model": self._model.state_dict(),
            "states": [state.state_dict() for state in self._states],
            "random": torch.get_rng_state(),
            "result": asdict(self._result),
        }
        # as a whole or not at all, should the process end here
        with replacing(_file(self._folder, step, rank)) as partial:
            torch.save(content, partial)
        # all ranks have the new one: from here on nobody needs the old
        dist.barrier()
        for old in _steps(self._folder, rank):
            if old != step:
                with contextlib.suppress(FileNotFoundError):
                    _file(self._folder, old, rank).unlink()


def _file(folder: Path, step: int, rank: int) -> Path:
    return folder / f"step{step}-rank{rank}.pt"


def _steps(folder: Path, rank: int) -> list[int]:
    names = (_NAME.fullmatch(path.name) for path in folder.glob("*.pt"))
    return sorted(int(name[1]) for name in names if name and int(name[2]) == rank)


def _read(file: Path) -> dict[str, Any]:
    try:
        # weights_only, because a pickle may run anything
        return torch.load(file, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    except Exception as error:  # whatever damaged bytes raise
        raise InputError(
            f"cannot read {file}; remove it to start from an older one: {first_line(error)}"
        ) from None
