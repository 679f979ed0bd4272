"""Every rule that concerns several fields of one object, once: as CEL for the API server, as Python for the rest.

The API server refuses with the CEL at once; `finetune validate` and the operator check the Python, which can also
do arithmetic for the way out. A test holds the two against each other on a real API server. A rule without CEL
concerns a field of no fixed type (`auto` or a list), which CEL cannot look at; what the schema itself can say in
its place is in `schema`.
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
)
from finetune_operator.api.rules.rule import Rule

RULES: tuple[Rule, ...] = (
    *data.RULES,
    *evaluation.RULES,
    *training.RULES,
    *batch_rules.RULES,
    *combination_rules.RULES,
    *parallelism.RULES,
    *resource_rules.RULES,
)
"""Order is the order of reporting."""
