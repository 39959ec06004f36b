"""MkDocs hook: pages of the site that are files of the repository's root.

`docs/index.md`, `contributing.md`, `security.md` and `changelog.md` hold one line each; their content is the README and
its siblings, with links rewritten to pages of the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
}
LINKS = {target: page for page, target in PAGES.items()}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text of a page."""
    source = PAGES.get(page.file.src_uri)
    if source is None:
        return markdown
    text = (ROOT / source).read_text(encoding="utf-8")
    text = re.sub(r"\]\(docs/", "](", text)
    return re.sub(r"\[([^\]]+)\]\(([\w./-]+)\)", _link, text)


def _link(match: re.Match[str]) -> str:
    """Links to other root files are pages of the site; links to folders of the repository become plain text."""
    label, target = match.groups()
    if target in LINKS:
        return f"[{label}]({LINKS[target]})"
    return match.group() if (ROOT / "docs" / target).exists() else f"`{target}`"
