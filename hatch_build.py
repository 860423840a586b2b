"""What the wheel says of itself: the README, without the links to files that an index's page does not have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# ![what it shows](a file of the repository), and links likewise; addresses stay
_PICTURE = re.compile(r"!\[([^\]]*)\]\((?!\w+:)([^)]*)\)")
_LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:)[^)]*\)")


class Description(MetadataHookInterface):
    """Names pictures, and leaves the words of links."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the description."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = _PICTURE.sub(r"(\1: `\2` in the source distribution.)", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": _LINK.sub(r"\1", text)}
