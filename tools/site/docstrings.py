"""Docstrings of this project, made ready for Markdown."""

from __future__ import annotations

import re
from typing import Any

from griffe import Docstring, Extension, Module, NameResolutionError, Object

__all__ = ["Docstrings"]

_ROLE = re.compile(r":(?:class|func|meth|attr|data|mod):`~?([\w.]+)`")
_SECTION = re.compile(r"(?:^|\n)(?:Parameters|Attributes)\n-+\n.*?(?=\n\n\w+\n-+\n|\Z)", re.DOTALL)
_ENTRY = re.compile(r"^(\*{0,2}\w[\w, *]*) : (.*)$", re.MULTILINE)


class Docstrings(Extension):
    """Links instead of Sphinx roles; what stands after an entry's colon is its description, not its type."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite a docstring before it is parsed."""
        if obj.docstring:
            obj.docstring.value = _markdown(obj.docstring, obj)

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Rewrite a package's docstring: griffe does not count a package among its objects."""
        self.on_object(obj=pkg)


def _markdown(docstring: Docstring, obj: Object) -> str:
    text = _SECTION.sub(lambda section: _ENTRY.sub(r"\1\n    \2", section[0]), docstring.value)
    text = re.sub(r"^::$", "", text, flags=re.MULTILINE)
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    return _ROLE.sub(lambda role: _link(role[1], obj), text)


def _link(name: str, obj: Object) -> str:
    """Return a cross-reference that is plain code where there is no page about the name."""
    try:
        target = obj.resolve(name)
    except NameResolutionError:
        target = name
    return f'<autoref identifier="{target}" optional><code>{name}</code></autoref>'
