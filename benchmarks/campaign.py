"""Break things on purpose, thousands of times, and look at what is left.

    .venv/bin/python benchmarks/campaign.py [PART ...] [--trials N] [--write]

Every part is a kind of trial (``benchmarks/faults``), numbered and seeded by its number. What happened is stored in
docs/results/campaign.jsonl after every batch, and no trial is repeated, so the program can be interrupted; a batch
whose line is taken out runs again. With ``--trials`` a part goes on to that number. Trials run in a process of their
own: one that dies or hangs is a fault too. The table is printed at the end; ``--write`` also puts it into
docs/reliability.md.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

from faults.processes import start
from records import RESULTS, Row, by, command, complete, grid, show, stored

FILE = RESULTS / "campaign.jsonl"


@dataclass(frozen=True)
class Part:
    """A kind of trial.

    Attributes
    ----------
    trial : str
        Module and function.
    what : str
        What is done to what, for the table.
    trials : int
        How many belong to the whole campaign.
    short : int
        How many run with the tests, beside those that tests of a room run.
    batch : int
        How many are stored together.
    limit : float
        Seconds after which a trial hangs.
    """

    trial: str
    what: str
    trials: int
    short: int
    batch: int = 50
    limit: float = 180


PARTS = {
    "writers": Part("faults.kills.writer", "a trace's writer killed", 400, 0),
    "captures": Part("faults.kills.capture", "a training with a capture killed", 400, 1),
    "two ranks": Part("faults.kills.captures", "two ranks with a capture killed", 300, 1),
    "shards": Part("faults.kills.shards", "two writers of a sharded model killed", 100, 0, 20),
    "full disks": Part("faults.disks.full", "the disk full while capturing", 100, 1, 20),
    "read-only": Part("faults.disks.read_only", "the disk read-only while capturing", 100, 1, 20),
    "vanished": Part("faults.disks.vanished", "the trace moved away while capturing", 100, 1, 20),
    "failing disks": Part(
        "faults.disks.failing", "writes that end in EIO or take 20 ms", 100, 1, 20
    ),
    "resumes": Part(
        "faults.resumes.resume", "a compressor with a memory, resumed at 50 steps", 125, 0, 5, 600
    ),
    "lost ranks": Part(
        "faults.ranks.lose", "one rank of four killed, stopped or slow in an exchange", 72, 1, 6
    ),
    "calls": Part("faults.calls.hostile", "hostile arrays and arguments", 20_000, 30, 1000),
    "files": Part("faults.files.mutated", "mutated files and traces", 100_000, 40, 2000),
    "dumps": Part(
        "faults.files.mutated_dump", "mutated dumps, shards and checkpoints", 20_000, 20, 2000
    ),
    "messages": Part("faults.wire.message", "damaged messages", 20_000, 30, 1000),
    "messages of ranks": Part(
        "faults.wire.between_ranks", "damaged messages between two ranks, verified", 100, 1, 20, 60
    ),
    "options": Part("faults.options.trial", "ranks that were given different things", 600, 12, 50),
    "checkpoints": Part("faults.checkpoints.mutated", "altered checkpoints", 5200, 26, 650),
    "soak": Part("faults.soak.soak", "100,000 captured steps", 1, 0, 1, 7200),
    "outputs": Part("faults.outputs.replaced", "a command killed while it writes", 100, 1, 10, 300),
    "tables": Part("faults.names.tables", "hostile names in every table format", 5000, 10, 500),
    "reports": Part("faults.names.report", "hostile names in a report", 20, 0, 5, 300),
}


def batch(trials: Sequence[tuple[Part, int]], reports: Connection) -> None:
    """Run trials of any parts; report the number and the outcome of each, or what was wrong."""
    # the process that this one was forked from forks its ranks, too: another would import everything again
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
    for part, number in trials:
        module, _, function = part.trial.rpartition(".")
        trial: Callable[[int, Path], str] = getattr(import_module(module), function)
        with tempfile.TemporaryDirectory(prefix="gradstats-", ignore_cleanup_errors=True) as folder:
            try:
                outcome, fault = trial(number, Path(folder)), ""
            except Exception as error:
                outcome, fault = "fault", f"{type(error).__name__}: {error}"[:300]
        reports.send((number, outcome, fault))


def run(name: str, numbers: range) -> Row:
    """Run some trials of a part in a process of their own; return the row to store."""
    part = PARTS[name]
    outcomes: Counter[str] = Counter()
    faults = []
    started = time.monotonic()
    left = list(numbers)
    process = start(batch, [(part, n) for n in left])
    while left:
        report = process.report(part.limit)
        number, outcome, fault = report or (left[0], "fault", "died" if report is None else "hung")
        outcomes[outcome] += 1
        if fault:
            faults.append({"trial": number, "what": fault})
        left = left[left.index(number) + 1 :]
        if not report:  # what comes after it runs in a fresh process
            process.kill()
            process.join()
            process = start(batch, [(part, n) for n in left]) if left else process
    process.join()
    return {
        "part": name,
        "first": numbers.start,
        "trials": len(numbers),
        "seconds": round(time.monotonic() - started, 1),
        "outcomes": dict(outcomes.most_common()),
        "faults": faults,
    }


def table(rows: list[Row]) -> str:
    """Return the counts of all parts as Markdown."""
    lines = []
    for name, part in PARTS.items():
        own = [row for row in rows if row["part"] == name]
        outcomes = sum((Counter(row["outcomes"]) for row in own), Counter[str]())
        faults = outcomes.pop("fault", 0)
        left = "; ".join(f"{outcome} {count:,}" for outcome, count in outcomes.most_common())
        trials = sum(row["trials"] for row in own)
        if trials:
            lines.append([part.what, f"{trials:,}", left, str(faults)])
    return grid("what is done | trials: | what was left | faults:", lines)


def batches(names: Iterable[str], trials: int | None) -> dict[tuple[str, int], range]:
    """Return the batches of some parts, with all trials or so many, by name and first trial."""
    found = {}
    known = {(row["part"], row["first"]): row["trials"] for row in stored(FILE)}
    for name in names:
        total, first = PARTS[name].trials if trials is None else trials, 0
        while first < total:
            size = known.get((name, first), PARTS[name].batch)
            found[name, first] = range(first, min(first + size, total))
            first += size
    return found


def told(row: Row) -> Row:
    """Tell of the faults in a row."""
    for fault in row["faults"]:
        print(f"{row['part']} {fault['trial']}: {fault['what']}", file=sys.stderr)
    return row


def main() -> None:
    """Run what is not stored yet, and print the table."""
    parser = command(__doc__, "reliability.md")
    parser.add_argument("parts", nargs="*", help=f"some of: {', '.join(PARTS)}")
    parser.add_argument("--trials", type=int, help="trials of each part, if not all")
    options = parser.parse_args()
    unknown = set(options.parts) - PARTS.keys()
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    numbers = batches(options.parts or PARTS, options.trials)
    rows = complete(FILE, by("part", "first"), numbers, lambda *b: told(run(b[0], numbers[b])))
    show({"campaign": table(rows)}, options.write, "reliability.md")


if __name__ == "__main__":
    main()
