"""PyTorch's own tests of DDP: the page shows the committed results, and every difference has its reason."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from records import DOCS, ROOT


@pytest.mark.slow
def test_the_page_shows_the_committed_results_and_every_difference_has_its_reason():
    command = [sys.executable, str(ROOT / "benchmarks" / "torch_ddp_tests.py"), "--table"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shown = done.stdout.strip()
    page = (DOCS / "reliability.md").read_text(encoding="utf-8")
    assert f"<!-- torch ddp -->\n{shown}\n<!-- /torch ddp -->" in page
    assert "not known" not in shown
    hooks = [
        line for line in shown.splitlines() if re.match(r"\| `(allreduce|dense|capture)`", line)
    ]
    assert len({sum(map(int, line.split("|")[2:5])) for line in hooks}) == 1  # the same tests
