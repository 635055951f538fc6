"""MkDocs hook: links of the manual that lead out of docs/.

GitHub follows ``../CONTRIBUTING.md``; the site has no such page. If pyproject.toml names a repository, such a link leads to the file
there. Otherwise its text stays, without a link. Links inside docs/ are left to the validation of MkDocs.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s:]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page's text with its links out of docs/ replaced."""
    return replace_outside_links(markdown, page.file.src_uri, _repository_url())


def replace_outside_links(text: str, page: str, repository_url: str | None) -> str:
    """Replace the links out of docs/ in ``text``, the page at ``page`` below docs/."""

    def replace(link: re.Match[str]) -> str:
        path, hash_sign, anchor = link[2].partition("#")
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), path))
        if target == "docs" or target.startswith("docs/"):
            return link[0]
        if repository_url is None:
            return link[1]
        return f"[{link[1]}]({repository_url}/blob/main/{target}{hash_sign}{anchor})"

    return _LINK.sub(replace, text)


def _repository_url() -> str | None:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    url = project.get("urls", {}).get("Repository")
    return url.rstrip("/") if url else None
