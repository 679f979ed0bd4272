"""Values as YAML that every reader takes for the same values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from finetune_operator.documents.scalars import NotResolvableError, resolve


def documents(values: Sequence[Any]) -> str:
    """YAML, a document each."""
    return yaml.dump_all(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, and in quotes what kubectl would read as something other than
    text."""

    def ignore_aliases(self, data: object) -> bool:
        """Equal parts are written out: a reader should not have to know anchors."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None if _stays_text(text) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _stays_text(text: str) -> bool:
    try:
        return isinstance(resolve(text, None, plain=True), str)
    except NotResolvableError:
        return False


_Dumper.add_representer(str, _text)
