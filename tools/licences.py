"""Print the licences of the packages that gradstats needs, as `pip-licenses` finds them in an environment.

    PYTHONPATH=benchmarks python tools/licences.py [--write]

``make licences`` writes the table into docs/install.md, as ``--write`` does. ``--python`` names the environment.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib

from pages import DOCS, ROOT, put

__all__ = ["needed", "table"]

PAGE = DOCS / "install.md"
_DEVELOPERS = ("dev", "docs")


def needed() -> list[str]:
    """Return the packages that gradstats and its extras name, without those of developers."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    extras = project["optional-dependencies"]
    asked = [r for extra in extras if extra not in _DEVELOPERS for r in extras[extra]]
    names = {re.match(r"[\w-]+", r)[0].lower() for r in [*project["dependencies"], *asked]}  # type: ignore[index]
    return sorted(names - {"gradstats"})


def table(licences: dict[str, str]) -> str:
    """Return licences by package as Markdown, one line for each licence.

    Parameters
    ----------
    licences : dict of str to str
        Licence of each package.
    """
    by: dict[str, list[str]] = {}
    for name, licence in sorted(licences.items()):
        by.setdefault(licence, []).append(name)
    lines = [f"| {'; '.join(names)} | {licence} |" for licence, names in by.items()]
    return "\n".join(["| packages | licence, as they say it |", "|---|---|", *lines])


def main() -> None:
    """Print the table, or write it into its page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="of the environment to look into")
    parser.add_argument("--write", action="store_true", help="put the table into its page")
    options = parser.parse_args()
    command = [sys.executable, "-m", "piplicenses", f"--python={options.python}", "--from=mixed"]
    done = subprocess.run(
        [*command, "--format=json", "--packages", *needed()],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = {r["Name"].lower().replace("_", "-"): r["License"] for r in json.loads(done.stdout)}
    if missing := set(needed()) - found.keys():
        print(f"not installed here: {', '.join(sorted(missing))}", file=sys.stderr)
    made = table(found)
    if options.write:
        put(PAGE, "licences", made)
    else:
        print(made)


if __name__ == "__main__":
    main()
