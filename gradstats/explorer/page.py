"""The explorer as a page of its own, which loads nothing."""

from __future__ import annotations

import base64
import html
from importlib.resources import files
from string import Template

from gradstats.tables import visible
from gradstats.version import __version__

__all__ = ["MODULE", "page"]

MODULE = files(__package__) / "explorer.js"
"""The module that draws, made by ``npm run build`` in the folder ``js`` beside this file."""


def page(title: str, payload: str) -> str:
    """Return the whole document.

    Parameters
    ----------
    title : str
        Title, as plain text.
    payload : str
        What :func:`gradstats.explorer.data.payload` returned.

    Returns
    -------
    str
        HTML.
    """
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    licences = files(__package__).joinpath("explorer.LICENSES.txt").read_bytes()
    # string.Template: braces are all over the styles and scripts
    return Template(template).substitute(
        title=html.escape(visible(title)),
        version=__version__,
        # in base64, as a licence may have any character
        licences=base64.b64encode(licences).decode(),
        payload=payload.replace("<", "\\u003c"),  # no name of a layer ends the script
        script=MODULE.read_text(encoding="utf-8"),
    )
