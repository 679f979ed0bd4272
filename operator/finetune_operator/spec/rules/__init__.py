"""Rules across several fields of one object, each written once, in CEL.

The API server refuses by the CEL at once; `finetune validate` and the operator read the same text with `cel`, and a
test compares the two on a real API server. Functions in Python give the hints with a job's own numbers. A rule without
CEL is about a field of no fixed type (`auto` or a list), which CEL cannot read: it has a test in Python, and `schema`
holds the part of it that the schema can express.
"""

from __future__ import annotations

from finetune_operator.spec.rules import (
    column_rules,
    combination_rules,
    data_rules,
    evaluation_rules,
    pair_rules,
    parallelism_rules,
    resource_rules,
    training_rules,
)
from finetune_operator.spec.rules.data_rules import SOMETHING_TO_DO
from finetune_operator.spec.rules.rule import Rule

__all__ = ["RULES", "SOMETHING_TO_DO"]

_TOPICS = (
    data_rules, column_rules, evaluation_rules, training_rules, combination_rules, parallelism_rules, resource_rules,
    pair_rules,
)  # fmt: skip
RULES: tuple[Rule, ...] = tuple(rule for topic in _TOPICS for rule in topic.RULES)
"""In the order of reporting."""
