"""The users' part of the pages stays readable in an afternoon, and leads to all of them."""

from __future__ import annotations

import re

from conftest import ROOT

DOCS = ROOT / "docs"
MOST = 20_000
"""Words of the users' part, without what is made from the code: command line, Python reference and stable names."""


def users_pages() -> list[str]:
    """Return the pages in the navigation before the part for referees and developers."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:\n")[2]
    users, found, _ = nav.partition("- For referees and developers:")
    assert found
    pages = re.findall(r"[\w/]+\.md", users)
    return [p for p in pages if not p.startswith("reference/api/") and p != "reference/cli.md"]


def test_the_users_part_is_short():
    written = [page for page in users_pages() if page != "reference/stable.md"]
    words = {page: len((DOCS / page).read_text(encoding="utf-8").split()) for page in written}
    assert len(words) > 30
    assert sum(words.values()) <= MOST, sorted(words.items(), key=lambda item: -item[1])


def test_the_overview_leads_to_every_page_of_the_users():
    overview = (DOCS / "index.md").read_text(encoding="utf-8")
    linked = {target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", overview)}
    assert set(users_pages()) - {"index.md"} <= linked


def test_no_page_of_the_users_names_a_test():
    for page in users_pages():
        text = (DOCS / page).read_text(encoding="utf-8")
        assert re.findall(r"tests/\w+/test_\w+\.py|`test_\w+`", text) == [], page
