"""Run a quick part of the tests with other versions of Python and of everything that gradstats needs.

    PYTHONPATH=benchmarks python tools/matrix.py [ENVIRONMENT…] [--again] [--write]

``make matrix`` runs every environment that has no result in docs/results/matrix.json yet, and puts the table into
docs/install.md, as ``--write`` alone does. Environments lie in the folder ``--work``, about 6 GB each with the CUDA
libraries of PyTorch from PyPI; what uv has downloaded is shared. An interpreter is looked for on the path and in
pyenv's folder. ``--interpreter`` names another, with words before it: a Python of Debian sid, in a folder that
debootstrap made and that has ``--work`` and this repository mounted, is
``--interpreter 3.14='chroot /srv/sid /usr/bin/python3.14'``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pages import DOCS, RESULTS, ROOT, put

__all__ = ["ENVIRONMENTS", "QUICK", "Result", "table"]

FILE = RESULTS / "matrix.json"
PAGE = DOCS / "install.md"
ENVIRONMENTS = {
    "lowest": ("3.11", "lowest-direct"),
    "3.11": ("3.11", "highest"),
    "3.12": ("3.12", "highest"),
    "3.13": ("3.13", "highest"),
    "3.14": ("3.14", "highest"),
}
"""Version of Python, and how uv chooses the versions of packages, by name."""
EXTRAS = ("all", "remote")
TOOLS = ("pytest", "pytest-timeout", "hypothesis", "ml-dtypes")
"""Of the extra ``dev``, what the quick tests need."""
QUICK = (
    *("tests/test_public_api.py", "tests/test_registry.py", "tests/test_tables.py"),
    *("tests/primitives/test_primitives.py", "tests/trace/test_dumps.py"),
    *("tests/trace/test_sources.py", "tests/compressors/test_dense.py"),
    *("tests/hooks/test_gradient.py", "tests/capture/test_capture.py"),
    "tests/network/test_model.py",
)
"""Files with the quick tests; slow and distributed ones are left out, DDP in one process is among them."""
SHOWN = ("torch", "numpy", "scipy", "numba", "zarr")
_LIMIT_S = 1800
_LISTED = """
import importlib.metadata, json
print(json.dumps({d.name.lower(): d.version for d in importlib.metadata.distributions()}))
"""
_SUMMARY = re.compile(r"=+ (.*(?:passed|failed|error).*) in ([\d.]+)s.*=+")


@dataclass(frozen=True)
class Result:
    """What came of one environment.

    Attributes
    ----------
    name : str
        One of `ENVIRONMENTS`.
    outcome : str
        "passed", "failed" or "not run".
    date : str
        Day of the run.
    python : str
        Version of the interpreter; the wanted one where nothing ran.
    packages : dict of str to str
        Versions of everything that was installed.
    summary : str
        Last line of pytest, or why nothing ran.
    seconds : float
        How long the tests took.
    failed : list of str
        The tests that failed.
    """

    name: str
    outcome: str
    date: str
    python: str
    packages: dict[str, str] = field(default_factory=dict)
    summary: str = ""
    seconds: float = 0.0
    failed: list[str] = field(default_factory=list)


class NotRunError(Exception):
    """An environment that cannot be had here. The message says why."""


def interpreter(version: str, given: dict[str, str]) -> list[str]:
    """Return the words that start a version of Python."""
    if version in given:
        return shlex.split(given[version])
    places = [f"python{version}", *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    for place in filter(None, map(shutil.which, map(str, places))):
        # pyenv's shims are on the path even where they lead nowhere
        if not subprocess.run([place, "-c", ""], capture_output=True).returncode:
            return [place]
    raise NotRunError(f"no Python {version} on this machine")


def said(words: Sequence[str | Path], **options: object) -> str:
    """Run a command and return what it printed."""
    done = subprocess.run(
        list(map(str, words)),
        capture_output=True,
        text=True,
        **options,  # type: ignore[call-overload]
    )
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "nothing said").splitlines()[-1]
        raise NotRunError(f"{' '.join(map(str, words[:4]))}…: {last[:200]}")
    return str(done.stdout)


def tools() -> list[str]:
    """Return the requirements of the quick tests, as the extra ``dev`` has them."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return [
        next(r for r in re.findall(r'"([\w-]+[<>=][^"]*)"', text) if re.match(rf"{t}\b(?!-)", r))
        for t in TOOLS
    ]


def install(version: str, python: list[str], resolution: str, place: Path) -> None:
    """Make an environment, or complete one; gradstats is in it as it is in this checkout."""
    uv = shutil.which("uv")
    if uv is None:
        raise NotRunError("uv is missing: pip install uv")
    said([*python, "-m", "venv", "--without-pip", place])
    extra = place / "tools.in"
    extra.write_text("\n".join(tools()) + "\n", encoding="utf-8")
    wanted = ["--python-version", version, "--quiet"]
    compiled = place / "requirements.txt"
    chosen = [word for name in EXTRAS for word in ("--extra", name)]
    said(
        [
            *(uv, "pip", "compile", *wanted, "--resolution", resolution, *chosen),
            *(ROOT / "pyproject.toml", extra, "--output-file", compiled),
        ]
    )
    target = place / "lib" / f"python{version}" / "site-packages"
    said([uv, "pip", "install", *wanted, "--target", target, "--requirements", compiled])
    said([uv, "pip", "install", *wanted, "--target", target, "--no-deps", "--editable", ROOT])


def run(name: str, work: Path, given: dict[str, str]) -> Result:
    """Run the quick tests in one environment."""
    version, resolution = ENVIRONMENTS[name]
    today = datetime.date.today().isoformat()
    place = work / f"environment-{name}"
    try:
        python = interpreter(version, given)
        install(version, python, resolution, place)
        # a prefix such as chroot leaves this folder
        inside = [*python[:-1], "env", f"--chdir={ROOT}", str(place / "bin" / "python")]
        exact = said([*inside, "-c", "import platform; print(platform.python_version())"])
        listed = said([*inside, "-c", _LISTED])
        packages = dict(sorted(json.loads(listed).items()))
    except NotRunError as why:
        return Result(name, "not run", today, version, summary=str(why))
    options = ["-m", "not slow and not distributed", "-p", "no:cacheprovider"]
    # warnings of old and of future versions are no failures
    options += ["-W", "default", "--timeout", "300", "-q", "--durations", "30"]
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [*inside, "-m", "pytest", *options, *QUICK],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": "", "NUMBA_CACHE_DIR": str(place / "loops")},
            timeout=_LIMIT_S,
        )
        text = done.stdout
        (place / "pytest.txt").write_text(text + done.stderr, encoding="utf-8")
    except subprocess.TimeoutExpired:
        return Result(name, "failed", today, exact.strip(), packages, f"over {_LIMIT_S} s")
    seconds = round(time.monotonic() - begin, 1)
    last = (text.strip() or "pytest printed nothing").splitlines()[-1]
    summary = re.sub(r" in [\d.]+s.*", "", last.strip("= "))
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    outcome = "failed" if done.returncode else "passed"
    return Result(name, outcome, today, exact.strip(), packages, summary, seconds, failed)


def results() -> dict[str, Result]:
    """Return the results that are kept, by name."""
    if not FILE.exists():
        return {}
    return {r["name"]: Result(**r) for r in json.loads(FILE.read_text(encoding="utf-8"))}


def keep(found: dict[str, Result]) -> None:
    """Write the results, in the order of the environments."""
    kept = [asdict(found[name]) for name in ENVIRONMENTS if name in found]
    FILE.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def table(found: dict[str, Result]) -> str:
    """Return the results as Markdown."""
    lines = [
        f"| Python | packages | {' | '.join(SHOWN)} | quick tests | date |",
        "|---|---|" + "---|" * (len(SHOWN) + 2),
    ]
    for name, (version, resolution) in ENVIRONMENTS.items():
        which = "lowest declared" if resolution == "lowest-direct" else "newest"
        r = found.get(name) or Result(name, "not run", "–", version, summary="never tried")
        versions = [r.packages.get(each, "–") for each in SHOWN]
        said = r.summary if r.outcome == "passed" else f"{r.outcome}: {r.summary}"
        lines.append(f"| {r.python} | {which} | {' | '.join(versions)} | {said} | {r.date} |")
    return "\n".join(lines)


def main() -> None:
    """Run what has no result yet, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="ENVIRONMENT", help=", ".join(ENVIRONMENTS))
    parser.add_argument("--again", action="store_true", help="also run what has a result")
    parser.add_argument("--write", action="store_true", help="run nothing, write the table")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "matrix")
    parser.add_argument("--interpreter", action="append", default=[], metavar="VERSION=COMMAND")
    options = parser.parse_args()
    names = options.names or list(ENVIRONMENTS)
    if unknown := set(names) - ENVIRONMENTS.keys():
        parser.error(f"no such environment: {', '.join(sorted(unknown))}")
    given = dict(each.split("=", 1) for each in options.interpreter)
    found = results()
    for name in [] if options.write else names:
        if name in found and found[name].outcome == "passed" and not options.again:
            continue
        work = options.work.resolve()
        work.mkdir(parents=True, exist_ok=True)
        print(f"{name}: …", flush=True)
        found[name] = run(name, work, given)
        print(f"{name}: {found[name].outcome}, {found[name].summary}", flush=True)
        keep(found)
    put(PAGE, "matrix", table(found))


if __name__ == "__main__":
    main()
