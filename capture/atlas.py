"""The atlas: trainings of twelve kinds under three optimizers, captured and reduced to records, piece by piece."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from capture.options import DataDirOption, run_config, signals_end_the_command
from gradstats.cli.output import note
from gradstats.errors import InputError, unknown
from gradstats.files import refuse_address, replace_file

if TYPE_CHECKING:
    from capture.workloads.config import RunConfig

__all__ = ["PIECES", "TRAININGS", "atlas", "read_records", "run_piece"]

STEPS, RATIO = 60, 0.01
"""Steps of each training, and the ratio of its top-k with error feedback."""
_AT = {"early": range(6, 10), "middle": range(30, 34), "late": range(56, 60)}
"""Steps captured whole, on all ranks."""
_RECORDS, _SERIES = "atlas.jsonl", "atlas-steps.jsonl"


class _Part(NamedTuple):
    """A training of a piece: what is captured of it, and where its records go."""

    suffix: str
    """Of the trace's name."""
    file: str
    settings: dict[str, Any]
    phases: dict[str, Sequence[int]]
    """Steps, or exchanges, that are captured; all if there are none."""

    @property
    def key(self) -> tuple[str, str]:
        """The file and the first kind, by which records of the part are known."""
        return self.file, self.settings["kinds"][0]


_KINDS = ("gradient", "corrected", "update")
_WHOLE = _Part("", _RECORDS, {"kinds": _KINDS}, {**_AT})
_EVERY = _Part(
    "-steps", _SERIES, {"kinds": _KINDS, "store": "sketches", "ranks": (0,), "every": 1}, {}
)
# DiLoCo with an exchange every five steps, of which there are twelve
_LOCAL = _Part(
    "-local",
    _RECORDS,
    {"kinds": ("pseudogradient",), "compressor": "none", "local_steps": 5},
    {"early": range(1, 3), "middle": range(5, 7), "late": range(10, 12)},
)

# What a training has that differs from its workload's defaults: batches for a minute on two cores, and the folder of
# its data below --data-dir. Under SGD with momentum 0.9 the rates are those at which the loss falls.
TRAININGS: dict[str, dict[str, Any]] = {
    "resnet8-cifar16": {"data_dir": "cifar-10-batches-bin"},
    "vit-digits": {},
    "gpt-pydoc": {},
    "moe-pydoc": {},
    "lora-pydoc": {},
    "unet-digits": {},
    "policy-cartpole": {},
    "gcn-blocks": {},
    "dlrm-clicks": {},
    "lstm-an4": {"data_dir": "an4", "hidden": 128},
    "lstm-pydoc": {"hidden": 100},
    "simclr-digits": {},
}
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "momentum": 0.9},
    "adamw": {"optimizer": "adamw"},
    "muon": {"optimizer": "muon"},
    "adamw-bf16": {"optimizer": "adamw", "autocast": True},
}
_SGD_RATES = {
    "vit-digits": 0.02,
    "unet-digits": 0.02,
    "policy-cartpole": 0.02,
    "lstm-pydoc": 0.5,
    "lstm-an4": 0.001,
}
PIECES = (
    *(
        f"{training}/{optimizer}"
        for optimizer in ("sgd", "adamw", "muon")
        for training in TRAININGS
    ),
    # once, for what a forward pass in bfloat16 changes
    "gpt-pydoc/adamw-bf16",
)
"""Pieces of the atlas: a training and an optimizer."""


def settings_of(piece: str, data_dir: Path | None = None) -> dict[str, Any]:
    """Return the settings of a piece's training.

    Parameters
    ----------
    piece : str
        One of :data:`PIECES`.
    data_dir : Path, optional
        Folder that holds the data sets' folders.

    Returns
    -------
    dict of str to object
        Fields of :class:`capture.workloads.RunConfig`.
    """
    training, optimizer = piece.split("/")
    settings: dict[str, Any] = {
        "steps": STEPS,
        "ratio": RATIO,
        "compressor": "topk",
        "evaluate": False,
    }
    settings |= TRAININGS[training] | _OPTIMIZERS[optimizer]
    if optimizer == "sgd" and training in _SGD_RATES:
        settings["learning_rate"] = _SGD_RATES[training]
    if "data_dir" in settings:
        if data_dir is None:
            raise InputError(
                f"{training} reads {settings['data_dir']}/: name the folder that it is in with --data-dir"
            )
        settings["data_dir"] = data_dir / settings["data_dir"]
    return settings | {"workload": training}


def _parts(piece: str) -> list[_Part]:
    """Return the trainings of a piece: Muon has two optimizers, which local steps do not keep."""
    return [_WHOLE, _EVERY, *([] if piece.endswith("/muon") else [_LOCAL])]


def run_piece(config: RunConfig, phases: dict[str, Sequence[int]]) -> list[dict[str, Any]]:
    """Train, and reduce the trace to records.

    Parameters
    ----------
    config : RunConfig
        Settings of the training, with a trace to create.
    phases : dict of str to sequence of int
        Steps of each phase; none for a series of every step.

    Returns
    -------
    list of dict
        Records of :func:`gradstats.analysis.atlas.atlas_records`, or of :func:`gradstats.analysis.atlas.step_records`,
        with the first and the last losses.
    """
    from capture.workloads import run
    from gradstats.analysis.atlas import atlas_records, step_records

    assert config.out is not None
    losses = run(config).losses
    # a tenth of the steps at either end: losses of single batches scatter
    few = max(len(losses) // 10, 1)
    ends = {"first_loss": sum(losses[:few]) / few, "last_loss": sum(losses[-few:]) / few}
    records = atlas_records(config.out, phases) if phases else step_records(config.out)
    return [record | ends for record in records]


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file, without a last line that was cut off.

    Parameters
    ----------
    path : Path
        File of JSON lines; it need not be there.

    Returns
    -------
    list of dict
        Records.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _short(value: Any) -> Any:
    """Return numbers with five digits, which are as many as samples of steps are good for."""
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_short(v) for v in value]
    if isinstance(value, float):
        # JSON has neither NaN nor infinity; NaN is not below infinity
        return float(f"{value:.5g}") if abs(value) < float("inf") else None
    # integers and truth values of NumPy
    return value.item() if hasattr(value, "item") else value


def atlas(  # numpydoc ignore=PR01
    out: Annotated[
        Path, typer.Option(help=f"Folder for {_RECORDS} and, while a piece runs, its trace.")
    ] = Path("atlas"),
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Run these pieces alone: TRAINING, OPTIMIZER or TRAINING/OPTIMIZER (repeatable)."
        ),
    ] = None,
    data_dir: DataDirOption = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the traces, some 100 MB each.")
    ] = False,
    page: Annotated[
        Path | None, typer.Option(help="Write the page of all records there.", metavar="FILE.md")
    ] = None,
) -> None:
    """Train twelve kinds of models under three optimizers, and record what their gradients are like.

    Pieces that are recorded already are skipped, so a run that was stopped goes on. Without --only it takes hours.
    """
    refuse_address(out)
    chosen = list(_chosen(only))
    out.mkdir(parents=True, exist_ok=True)
    records = {name: read_records(out / name) for name in (_RECORDS, _SERIES)}
    done = {(r["piece"], (name, r["kind"])) for name, each in records.items() for r in each}
    for piece in chosen:
        for part in _parts(piece):
            if (piece, part.key) in done:
                continue
            try:
                settings = settings_of(piece, data_dir) | part.settings
            except InputError as error:
                # what is asked for by name fails; a run of everything leaves it out
                if only:
                    raise
                note(f"{piece} is left out: {error}")
                break
            trace = out / f"{piece.replace('/', '-')}{part.suffix}.zarr"
            at = tuple(step for steps in part.phases.values() for step in steps)
            config = run_config(**settings, label=piece, out=trace, at=at, overwrite=True)
            config.check()
            training, optimizer = piece.split("/")
            labels: dict[str, Any] = {"piece": piece, "training": training, "optimizer": optimizer}
            labels |= {"rate": config.initial_learning_rate}
            note(f"{piece}{part.suffix}: {config.nproc} processes, {STEPS} steps")
            with signals_end_the_command():
                rows = [_short(labels | r) for r in run_piece(config, part.phases)]
            records[part.file] += rows
            # a training is recorded whole, or not at all
            lines = (json.dumps(r) + "\n" for r in records[part.file])
            replace_file(out / part.file, "".join(lines))
            if not keep:
                # after the records are on the disk: without them the piece is trained again
                shutil.rmtree(trace)
            note(f"  loss {rows[0]['first_loss']:.3f} → {rows[0]['last_loss']:.3f}")
    if page is not None:
        from gradstats.report.atlas import atlas_page

        replace_file(page, atlas_page(records[_RECORDS], records[_SERIES], PIECES, STEPS))


def _chosen(only: Sequence[str] | None) -> Iterator[str]:
    """Yield the pieces that words name."""
    words = {word for piece in PIECES for word in (piece, *piece.split("/"))}
    for word in only or ():
        if word not in words:
            raise unknown("piece", word, sorted(words))
    for piece in PIECES:
        if not only or {piece, *piece.split("/")} & {*only}:
            yield piece
