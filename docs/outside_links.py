"""A hook of mkdocs: links to files of the repository that are not pages of the site become the names of these files."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]*)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace each link that leaves ``docs/`` by its text with the file's path behind it."""
    folder = PurePosixPath("docs", page.file.src_uri).parent

    def named(link: re.Match[str]) -> str:
        path = os.path.normpath(folder / link[2])
        if path.startswith("docs/"):
            return link[0]
        if not (_ROOT / path).exists():
            raise FileNotFoundError(f"{page.file.src_uri}: expected a file of the repository, but got {link[0]}")
        return f"{link[1]} (`{path}`)"

    return _LINK.sub(named, markdown)
