"""Each link between the repository's own files leads to a file, and to a heading in it where it names one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
OUTSIDE = re.compile(r"[a-z]+:")


@cache
def anchors_of(page: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, as GitHub writes them, and those that its HTML names."""
    text = page.read_text(encoding="utf-8")
    found = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    tokens = MarkdownIt("commonmark").parse(text)
    for token, content in pairwise(tokens):
        if token.type == "heading_open":
            written = "".join(part.content for part in content.children or ())
            anchor = re.sub(r"[^\w\- ]", "", written.lower()).replace(" ", "-")
            number = 0
            while (numbered := f"{anchor}-{number}" if number else anchor) in found:
                number += 1
            found.add(numbered)
    return frozenset(found)


def links_of(page: Path) -> list[str]:
    """Return the targets of a page's links and images."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))
    children = [child for token in tokens for child in token.children or ()]
    return [
        str(child.attrs.get("href") or child.attrs.get("src"))
        for child in children
        if child.type in ("link_open", "image")
    ]


def test_links_between_files_lead_somewhere(tracked_files: Sequence[Path]) -> None:
    broken, followed = [], 0
    for page in (file for file in tracked_files if file.suffix == ".md"):
        for link in links_of(page):
            if OUTSIDE.match(link):
                continue
            followed += 1
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists():
                broken.append(f"{page.relative_to(ROOT)}: {link}: no such file")
            elif anchor and target.suffix == ".md" and anchor not in anchors_of(target):
                broken.append(f"{page.relative_to(ROOT)}: {link}: no such heading")
    assert broken == []
    assert followed > 100
