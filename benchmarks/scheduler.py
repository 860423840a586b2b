"""A trace in a bucket, read in one process and by eight workers of a dask cluster: the same output, at what cost.

    .venv/bin/python benchmarks/scheduler.py [TRACE ...] [--write]

moto's server, which `make .venv` installs, holds the traces at an address of the loopback interface, as S3 does. Each
command reads the bucket without and with ``--scheduler``, one after the other; its output, JSON or the
page of a report, is stored as a hash. CPU seconds are those of the command and of all workers, bytes what the server
sent, and the peak is that of the process, or of the largest worker, and holds the libraries that it has imported. Each
run is stored in docs/results/scheduler.jsonl as soon as it ends, and is not repeated; ``--write`` also puts the table
into docs/statistics.md. More workers than cores show that the result stays, and what a cluster costs, not that it is
faster.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from records import RESULTS, ROOT, Row, by, command, complete, grid, missing, processor, show

from gradstats.trace import Layer, TraceWriter, create_trace

FILE = RESULTS / "scheduler.jsonl"
WORKERS = 8
NUMEL, STEPS, RANKS = 9_000_000, 2, 2
"""Elements of the larger trace: three pieces of each gradient, 144 MB in all."""
TRACES = ("resnet20", "laplace")
COMMANDS = {
    "quality": "--ratio 0.01 --estimator exact --estimator sidco-e",
    "fit": "--model laplace --model dgamma",
    "compressibility": "",
    "drift": "",
    "report": "",
}
BUCKET, CLUSTER = "bucket", f"bucket, {WORKERS} workers"
WAYS = (BUCKET, CLUSTER)
KEY = by("trace", "command", "way")


def make(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """Return some traces by name; the larger one is of Laplace's law, and is written here."""
    found = {"resnet20": ROOT / "data" / "resnet20.zarr"}
    if "laplace" not in names:
        return found
    path, rng = folder / "laplace.zarr", np.random.default_rng(0)
    layers = [Layer("a", 0, (NUMEL // 3,)), Layer("b", NUMEL // 3, (NUMEL - NUMEL // 3,))]
    create_trace(path, layers, world_size=RANKS)
    for rank in range(RANKS):
        with closing(TraceWriter(path, rank)) as writer:
            for step in range(STEPS):
                gradient = rng.laplace(scale=1e-3 / (1 + step), size=NUMEL)
                writer.append(step, {"gradient": gradient.astype(np.float32)})
    return found | {"laplace": path}


class Counted:
    """A WSGI application, with how many requests to read it answered, and their bytes."""

    def __init__(self, application: Any) -> None:
        self._application, self._lock = application, threading.Lock()
        self.requests, self.bytes = 0, 0

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        """Answer a request."""
        size = 0
        for part in self._application(environ, start_response):
            size += len(part)
            yield part
        with self._lock:  # the server answers in several threads
            if environ["REQUEST_METHOD"] == "GET":
                self.requests, self.bytes = self.requests + 1, self.bytes + size


@contextmanager
def bucket(traces: Iterable[Path]) -> Iterator[Counted]:
    """Serve traces at s3://bucket/NAME to this process and those that it starts; yield what counts the requests."""
    import s3fs
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    counted = Counted(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, counted, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
    os.environ |= {"AWS_DEFAULT_REGION": "us-east-1"}
    system = s3fs.S3FileSystem()
    system.mkdir("bucket")
    for path in traces:
        system.put(str(path), f"bucket/{path.name}", recursive=True)
    try:
        yield counted
    finally:
        server.shutdown()


def peak_of(process: int | str) -> float:
    """Return the most MB that a process had, 0 of one that has ended."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) * 1024 / 1e6 if found else 0.0


def used(fresh: bool = False) -> tuple[float, float]:
    """As a worker: return its CPU seconds, and the most MB that it had since it was last asked to begin afresh."""
    peak = peak_of("self")
    if fresh:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return time.process_time(), peak


def measure(paths: dict[str, Path], counted: Counted, client: Any, *case: str) -> Row:
    """Run a command in one of the ways, and return its row."""
    trace, name, way = case
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page")
        words = [sys.executable, "-m", "gradstats", "--quiet", name]
        words += [f"s3://bucket/{paths[trace].name}"]
        words += [*COMMANDS[name].split(), "-o", str(page)]
        words += [] if name == "report" else ["--format", "json"]
        words += ["--scheduler", client.scheduler.address] if way == CLUSTER else []
        before, peak = client.run(used, fresh=True), 0.0
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        read, started = (counted.requests, counted.bytes), time.perf_counter()
        process = subprocess.Popen(words)
        while process.poll() is None:
            peak = max(peak, peak_of(process.pid))
            time.sleep(0.05)
        seconds = time.perf_counter() - started
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, words)
        usage, after = resource.getrusage(resource.RUSAGE_CHILDREN), client.run(used)
        # a report says by which command it was made, with the scheduler
        said = re.sub(rb"<p><code>gradstats .*?</code></p>", b"", page.read_bytes())
        output = hashlib.sha256(said).hexdigest()
    theirs = sum(after[each][0] - before[each][0] for each in after) if way == CLUSTER else 0.0
    return {
        **dict(zip(("trace", "command", "way"), case, strict=True)),
        "seconds": round(seconds, 2),
        "cpu": round(usage.ru_utime - spent.ru_utime + usage.ru_stime - spent.ru_stime, 2),
        "worker_cpu": round(theirs, 2),
        "requests": counted.requests - read[0],
        "bytes": counted.bytes - read[1],
        "peak": round(peak),
        "worker_peak": round(max(peak for _, peak in after.values())) if way == CLUSTER else None,
        "output": output,
        "processor": processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }


def table(rows: list[Row]) -> str:
    """Return the runs as Markdown, a line for each trace and command."""
    found = {KEY(row): row for row in rows}
    lines = []
    for trace, name in product(TRACES, COMMANDS):
        ways = [found[trace, name, way] for way in WAYS if (trace, name, way) in found]
        if len(ways) < len(WAYS):  # not run yet
            continue
        here, cluster = ways
        lines.append(
            [
                f"`{trace}`",
                f"`{name}`",
                "the same" if len({row["output"] for row in ways}) == 1 else "**another**",
                *(f"{row['bytes'] / 1e6:.1f}" for row in ways),
                f"{here['cpu']:.1f}",
                f"{cluster['cpu']:.1f} + {cluster['worker_cpu']:.1f}",
                *(f"{row['seconds']:.0f}" for row in ways),
                *(f"{row['peak']:,}" for row in ways),
                f"{cluster['worker_peak']:,}",
            ]
        )
    about = sorted({f"{row['processor']}, {row['cores']} cores" for row in rows})
    load = [row["load"] for row in rows]
    heads = (
        "trace | command | output | MB read: | with workers: | CPU s: | with workers, theirs last: | s: | "
        "with workers: | peak MB: | with workers: | of the largest worker:"
    )
    return f"{'; '.join(about)}, load {min(load):.0f} to {max(load):.0f}\n\n{grid(heads, lines)}"


def main() -> None:
    """Run what is not stored yet, and print the table."""
    parser = command(__doc__, "statistics.md")
    parser.add_argument("traces", nargs="*", default=TRACES, help=f"some of: {', '.join(TRACES)}")
    options = parser.parse_args()
    cases = list(product(options.traces, COMMANDS, WAYS))
    with ExitStack() as stack:
        measured = None
        if missing(FILE, KEY, cases):
            from distributed import Client, LocalCluster

            os.environ["OMP_NUM_THREADS"] = "1"  # of the command and the workers alike
            paths = make(Path(stack.enter_context(tempfile.TemporaryDirectory())), options.traces)
            counted = stack.enter_context(bucket(paths.values()))
            settings = {"n_workers": WORKERS, "threads_per_worker": 1, "dashboard_address": None}
            cluster = stack.enter_context(LocalCluster(host="127.0.0.1", **settings))
            client = stack.enter_context(Client(cluster))
            measured = partial(measure, paths, counted, client)
        rows = complete(FILE, KEY, cases, measured)
    show({"scheduler": table(rows)}, options.write, "statistics.md")


if __name__ == "__main__":
    main()
