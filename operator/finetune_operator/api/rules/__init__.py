"""Rules across several fields of one object, each written once: as CEL for the API server, as Python for the rest.

The API server refuses by the CEL at once; `finetune validate` and the operator check the Python, which can also do
arithmetic for the hint. A test compares the two on a real API server. A rule without CEL is about a field of no fixed
type (`auto` or a list), which CEL cannot read; `schema` holds the part of it that the schema can express.
"""

from __future__ import annotations

from finetune_operator.api.rules import (
    batch_rules,
    combination_rules,
    data,
    evaluation,
    parallelism,
    resource_rules,
    training,
    vllm_rules,
)
from finetune_operator.api.rules.data import SOMETHING_TO_DO
from finetune_operator.api.rules.rule import Rule

__all__ = ["RULES", "SOMETHING_TO_DO"]

RULES: tuple[Rule, ...] = (
    *data.RULES,
    *evaluation.RULES,
    *training.RULES,
    *batch_rules.RULES,
    *combination_rules.RULES,
    *parallelism.RULES,
    *resource_rules.RULES,
    *vllm_rules.RULES,
)
"""In the order of reporting."""
