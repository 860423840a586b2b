"""The whole command line, `capture`'s commands included, for Typer to describe."""

from __future__ import annotations

from importlib.metadata import entry_points

from gradstats.cli import app

__all__ = ["app"]

for entry in entry_points(group="gradstats.commands"):
    entry.load()(app)
