"""What mkdocs does beyond its plugins: the page of the command line, and formulas without scripts."""

from __future__ import annotations

import re
import subprocess
import sys
from html import unescape
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

__all__ = ["on_files", "on_page_content"]

_TIGHT = re.compile("<mo>(&#x(?:0007C|02016|0002F);)</mo>")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the command line reference, written by Typer from the same texts as ``--help``."""
    program = Path(__file__).with_name("cli.py")
    made = subprocess.run(
        [sys.executable, "-m", "typer", program, "utils", "docs", "--name", "gradstats"],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise PluginError(f"typer could not describe the command line: {made.stderr}")
    content = re.sub("^# `gradstats`$", "# Command line", made.stdout, count=1, flags=re.MULTILINE)
    files.append(File.generated(config, "reference/cli.md", content=content))
    return files


def on_page_content(html: str, **_: object) -> str:
    """Turn formulas into MathML, which browsers draw themselves: no script, no network."""
    return re.sub(
        r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', _mathml, html, flags=re.DOTALL
    )


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match[1] == "div" else "inline"
    mathml = convert(unescape(match[2]), display=display)
    # bars and slashes are fences and fractions here, neither stretched nor spaced like relations
    return _TIGHT.sub(r'<mo stretchy="false" lspace="0" rspace="0">\1</mo>', mathml)
