"""The page at `/`, to try the model in a browser.

It looks like `finetune ui`, with its own style sheet, since the trainer's image has no operator package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from types import MappingProxyType
from typing import Any

HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "Content-Security-Policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
)
"""Headers of the page and its files."""
_STATIC = files(__name__) / "static"
_MEDIA = MappingProxyType({"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"})
FILES: Mapping[str, tuple[bytes, str]] = MappingProxyType(
    {
        entry.name: (entry.read_bytes(), f"{_MEDIA[entry.name.rpartition('.')[2]]}; charset=utf-8")
        for entry in _STATIC.iterdir()
        if entry.name.rpartition(".")[2] in _MEDIA
    }
)
"""Name of each file that the page loads from `/page/NAME` -> its content and its media type."""


def page(models: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the HTML of the page. `models`: the answers of `/v2/models/NAME` for each model, the default one first.

    It reads `name` and, in `parameters`, `task`, `labels`, `pairs` (true if texts come in pairs), `label_form` (as
    `problem_type` of a model's config), `mask_token`, and `chat` (false: the model continues a text).
    """
    described = [{**metadata["parameters"], "name": metadata["name"]} for metadata in models]
    html = (_STATIC / "page.html").read_text(encoding="utf-8")
    values = {"NAME": described[0]["name"], "TASK": described[0]["task"], "MODELS": json.dumps(described)}
    before, *parts = html.split("{{")
    put = [before]
    for part in parts:
        name, _, rest = part.partition("}}")
        put += [escape(str(values[name])), rest]
    return "".join(put).encode()
