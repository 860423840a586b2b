"""What every pin needs: where values are kept, how they are rewritten, and which processor this is.

A pin is a value that the code gave before a change and must give after it. To rewrite all of them after a deliberate
change, run ``WRITE_PINS=1 python -m pytest tests/pins`` in one process (without ``-n``); ``git diff`` says what moved.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path

FOLDER = Path(__file__).parent / "data"
WRITES = bool(os.environ.get("WRITE_PINS"))


def digest(*parts):
    """Return a short hash of bytes and of anything that has a `repr`."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part if isinstance(part, bytes) else repr(part).encode())
        found.update(b"\0")
    return found.hexdigest()[:7]


def processor():
    """Return the kind of processor that Numba compiles for: vectors of another width add up in another order."""
    from numba.core.registry import cpu_target

    _, name, features = cpu_target.target_context.codegen().magic_tuple()
    on = {each[1:]: each[0] == "+" for each in features.split(",") if each}
    width = "avx512" if on.get("avx512f") else "avx2" if on.get("avx2") else "plain"
    return f"{platform.machine()} {width} {name}"


class Pins:
    """The values of one file of `data`."""

    def __init__(self, name):
        self.path = FOLDER / f"{name}.json"
        self.values = json.loads(self.path.read_text("utf-8")) if self.path.exists() else {}

    def get(self, *keys):
        """Return a value, None where there is none."""
        found = self.values
        for key in keys:
            found = found.get(key) if found is not None else None
        return found

    def put(self, value, *keys):
        """Keep a value, and write the file."""
        found = self.values
        for key in keys[:-1]:
            found = found.setdefault(key, {})
        found[keys[-1]] = value
        self.path.parent.mkdir(exist_ok=True)
        text = json.dumps(self.values, indent=0, ensure_ascii=False)
        self.path.write_text(text + "\n", encoding="utf-8")

    def check(self, value, *keys):
        """Assert that a mapping of names is as it was, or write it; a failure names what differs."""
        if WRITES:
            self.put(value, *keys)
            return
        assert changed(self.get(*keys), value) == {}


def changed(before, after):
    """Return {name: (before, after)} of what differs."""
    before, after = before or {}, after or {}
    return {
        name: (before.get(name), after.get(name))
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    }
