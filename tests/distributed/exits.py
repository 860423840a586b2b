"""Two ranks that end as scripts do: the interpreter goes, whatever is still alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

RANKS = """
import gc, os, sys
gc.freeze()  # or every rank spends seconds on what was imported
for trial in range({trials}):
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if not ranks[-1]:
            break
    else:
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        if any(codes):
            sys.exit(f"trial {{trial}} ended with {{codes}}")
        continue
    break
else:
    sys.exit()
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", init_method=f"file://{folder}/{{trial}}", rank=rank, world_size=2)
"""
"""Each rank is forked after the imports, and runs on to the end of the script."""


def assert_ends(imports, body, folder, trials):
    """Run a script on two ranks several times, and assert that it always ends with the code 0."""
    script = imports + RANKS.format(trials=trials, folder=folder) + body
    process = subprocess.Popen(
        [sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, said = process.communicate(timeout=120)
    finally:
        with suppress(ProcessLookupError):  # ranks that hang are of its session
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said
