"""Words of a name, by which it is compared with the fields of a job."""

from __future__ import annotations

import re
from collections.abc import Mapping

from finetune_contract.metrics import LOWER_IS_BETTER, METRICS, metrics_of
from finetune_operator.api.field_names import plain

_LIMIT_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("min", "minimum", "threshold", "least", "target", "required"), "minimum"),
    **dict.fromkeys(("max", "maximum", "most"), "maximum"),
}
_SYNONYMS: Mapping[str, str] = {
    "interval": "every", "frequency": "every", "num": "", "number": "", "of": "", "the": "", "last": "", "count": "",
    "quality": "",
}  # fmt: skip
"""Word of a name -> the word of ours; empty: it has no meaning by itself."""
NAMES_OF_METRICS = frozenset(name for task in METRICS for name in metrics_of(task))


def gate_of(name: str, value: float) -> str:
    """Return the hint for a metric with its limit in one name, such as `minAccuracy`; empty: it is none."""
    words = words_of(name)
    limits = [_LIMIT_WORDS[word] for word in words if word in _LIMIT_WORDS]
    rest = "".join(word for word in words if word not in _LIMIT_WORDS)
    metric = next((each for each in NAMES_OF_METRICS if plain(each) == rest), None)
    if metric is None:
        return ""
    limit = limits[0] if limits and limits[0] == "maximum" else "maximum" if metric in LOWER_IS_BETTER else "minimum"
    return f"set spec.evaluation.gate.metric to {metric} and spec.evaluation.gate.{limit} to {value}"


def words_of(name: str) -> list[str]:
    """Return the words of a name in either spelling, in lower case and without their plural."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+", name)
    return [word.lower() for word in words]


def meaning(name: str) -> frozenset[str]:
    """Return the words of a name by which it is compared with others."""
    words = (_SYNONYMS.get(word, word) for word in words_of(name))
    return frozenset(word.removesuffix("s") for word in words if word)
