"""The page about the architecture lists the rooms that the tests enforce."""

from __future__ import annotations

import re

from conftest import ROOT
from test_architecture import ROOMS


def test_the_rooms_and_their_order():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = re.search(r"<!-- rooms -->\n(.*?)<!-- /rooms -->", page, re.DOTALL)[1]
    assert re.findall(r"^\| `([\w.]+)`", table, re.MULTILINE) == ROOMS
