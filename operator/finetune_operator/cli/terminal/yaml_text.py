"""Values as YAML that every reader parses to the same values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from finetune_operator.documents.scalars import NotResolvableError, resolve


def documents(values: Sequence[Any]) -> str:
    """Return YAML, one document per value."""
    return yaml.dump_all(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """YAML dumper that writes multi-line text as a block, and quotes text that kubectl would parse as another type."""

    def ignore_aliases(self, data: object) -> bool:
        """Write equal parts in full: a reader should not have to know anchors."""
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
