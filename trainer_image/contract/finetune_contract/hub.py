"""Names of repositories on the Hugging Face Hub."""

from __future__ import annotations

import re

# Same rule as huggingface_hub.utils.validate_repo_id, with at most 96 characters in each part.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_PART}(?:/{_PART})?")


def is_hub_name(name: str) -> bool:
    """Return True for `name` or `organisation/name`: no path, no third part, no `..`, no `.git` at the end."""
    return _NAME.fullmatch(name) is not None and not re.search(r"\.\.|--|\.git$", name)
