"""Functions that ranks of test_lab.py run."""

import os
import re
from pathlib import Path


def whose(folder):
    """Return the numbers of user and group of all threads, the groups, what root alone may do, and the home."""
    threads = [path.read_text() for path in Path("/proc/self/task").glob("*/status")]
    numbers = {tuple(re.findall(r"^[UG]id:\s(.*)", text, re.M)) for text in threads}
    refused = []
    for call in (lambda: os.setresuid(0, 0, 0), lambda: os.setresgid(0, 0, 0), os.listdir):
        try:
            call("/proc/1/fd") if call is os.listdir else call()
        except PermissionError:
            refused.append(True)
    file = Path(folder, os.environ["RANK"])
    file.unlink(missing_ok=True)
    file.write_text("")
    return numbers, sorted(os.getgroups()), len(refused), os.environ["HOME"], file.stat().st_uid


def failing():
    raise LookupError("no such thing")
