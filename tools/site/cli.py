"""The whole command line, `capture`'s commands included, for Typer to describe."""

from __future__ import annotations

from gradstats.cli import app
from gradstats.registry import entries, load

__all__ = ["app"]

for entry in entries("gradstats.commands"):
    load(entry)(app)
