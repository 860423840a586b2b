"""Extensions of mkdocs: the page of the command line, formulas without scripts, and links in docstrings."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
import tempfile
from html import unescape
from importlib.metadata import version
from pathlib import Path
from typing import Any

from griffe import (
    Extension,
    Function,
    Module,
    NameResolutionError,
    Object,
    Parameter,
    ParameterKind,
)
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

from gradstats.explorer import write_explorer

__all__ = ["Docstrings", "on_config", "on_files", "on_page_content", "on_page_markdown"]

_NOTEBOOKS = Path(__file__).parents[2] / "notebooks"

_ROLE = re.compile(r":(?:class|func|meth|attr|data|mod|exc):`~?([\w.]+)`")
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
    files.append(File.generated(config, "assets/explore.html", content=_explorer()))
    for notebook in sorted(_NOTEBOOKS.glob("*.ipynb")):
        content, resources = MarkdownExporter().from_filename(str(notebook))
        content = content.replace("](../docs/", "](../")
        content = re.sub(r"\]\((\d\d_\w+)\.ipynb\)", r"](\1.md)", content)
        content = content.replace(
            '<table border="1" class="dataframe">', "<table>"
        )  # the site's look
        content = re.sub(r"\[([^\]]+)\]\(\.\./data/[^)]*\)", r"\1", content)  # no page of the site
        names = {name: f"{notebook.stem}_{name}" for name in resources["outputs"]}
        for name, new in names.items():
            content = content.replace(f"]({name})", f"]({new})")
            picture = resources["outputs"][name]
            files.append(File.generated(config, f"notebooks/{new}", content=picture))
        link = f"[This notebook]({notebook.name}) as it was executed; `make lab` opens it."
        title, _, rest = content.partition("\n\n")
        content = f"{title}\n\n{link}\n\n{rest}"
        files.append(
            File.generated(
                config, f"notebooks/{notebook.name}", content=notebook.read_text("utf-8")
            )
        )
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=content))
    return files


def _explorer() -> str:
    """Return the explorer's page of a committed trace, as the command writes it."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "explore.html"
        write_explorer(_NOTEBOOKS.parent / "data" / "resnet20.zarr", page)
        return page.read_text(encoding="utf-8")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show the version at the foot of every page."""
    config.copyright = f"gradstats {version('gradstats')}, Apache-2.0"
    return config


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Link the notebooks that their page names to their rendered pages."""
    if page.file.src_uri == "notebooks.md":
        return re.sub(r"\]\(\.\./(notebooks/\w+)\.ipynb\)", r"](\1.md)", markdown)
    return markdown


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


class Docstrings(Extension):
    """Markdown for the two things that docstrings have of reStructuredText: roles, and ``::`` before code."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite a docstring before it is parsed."""
        if obj.docstring:
            if isinstance(obj, Function) and any(
                p.name == "over" and p.kind is ParameterKind.var_keyword for p in obj.parameters
            ):
                _show_shared(obj)
            text = re.sub(r"^::$|:(?=:$)", "", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = _ROLE.sub(lambda role: _link(role[1], obj), text)

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Do the same for a package, which griffe does not count among its objects."""
        self.on_object(obj=pkg)


def _show_shared(obj: Function) -> None:
    """Show the options that a function shares with others, as `help` does."""
    function = getattr(importlib.import_module(obj.module.path), obj.name)
    obj.docstring.value = inspect.getdoc(function)
    del obj.parameters["over"]
    for p in inspect.signature(function).parameters.values():
        if p.name not in obj.parameters:
            default = getattr(p.default, "__name__", repr(p.default))
            obj.parameters.add(
                Parameter(
                    p.name,
                    annotation=p.annotation,
                    kind=ParameterKind.keyword_only,
                    default=default,
                )
            )


def _link(name: str, obj: Object) -> str:
    """Return a cross-reference that is plain code where no page has the name."""
    try:
        target = obj.resolve(name)
    except NameResolutionError:
        target = name
    return f'<autoref identifier="{target}" optional><code>{name}</code></autoref>'
