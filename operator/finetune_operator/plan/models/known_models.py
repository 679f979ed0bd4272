"""Configs of well-known checkpoints, as their authors published them: a plan needs no network for these.

The table is spec/tables/models.jsonl, a model a line with the keys that memory and time depend on, from the
`config.json` of the checkpoint where no `source` is given.
Encoders, GPT-2 and T5 are found by the last part of their name alone; of decoders (`variants`), which come in many
variants of one shape, also with words such as `instruct` behind it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache

from pydantic import JsonValue

from finetune_operator.spec.tables import text

Config = dict[str, JsonValue]

_VARIANT = re.compile(r"(?:-(?:hf|base|chat|instruct|it|v[0-9](?:\.[0-9]+)?|[0-9]{4}))*$")
"""Words behind a decoder's name that leave its shape."""
_FORMER = re.compile(r"^meta-(?=llama)")
"""Word before a decoder's name."""


@cache
def _table() -> Mapping[str, tuple[bool, Config]]:
    """Return name -> whether it has variants, and its config."""
    rows = map(json.loads, text("models.jsonl").splitlines())
    return {row["name"]: (row["variants"], row["config"]) for row in rows}


def known_names() -> tuple[str, ...]:
    """The names of all checkpoints in the table."""
    return tuple(_table())


def known_name(uri: str) -> str | None:
    """The checkpoint that the model's name stands for; None: the table does not have it."""
    table = _table()
    words = [part.lower() for part in uri.partition("://")[2].split("/") if part]
    for word in reversed(words):
        if word in table and not table[word][0]:
            return word
        name = _FORMER.sub("", word)
        for bare in (name, _VARIANT.sub("", name)):
            if bare in table and table[bare][0]:
                return bare
    return None


def known_config(name: str) -> Config:
    """The config of a checkpoint of that name. KeyError."""
    return dict(_table()[name][1])
