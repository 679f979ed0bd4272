"""Rule on a spec, in CEL and in Python, and the terms that rules of all topics use."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from pydantic import JsonValue

from finetune_contract.choices import Task
from finetune_operator.spec.rules.cel import predicate
from finetune_operator.spec.types import FineTuneJobSpec

Holds = Callable[[FineTuneJobSpec], bool]


@dataclass(frozen=True)
class Rule:
    """A rule on `spec`."""

    name: str
    path: str
    """Field to report, from `spec`."""
    cel: str | None
    """CEL that is true if the rule holds; `self` is spec, after defaults. None: see the package's docstring."""
    text: str
    """Rule as a sentence without its full stop."""
    hint: str
    test: Holds | None = None
    """Test in Python in place of CEL, or beside CEL where a job's own arithmetic goes further."""
    advice: Callable[[FineTuneJobSpec], str] | None = None
    """Hint with the job's own numbers, if arithmetic helps."""
    cause: Callable[[FineTuneJobSpec], tuple[str, str] | None] | None = None
    """Field to report in place of `path`, and the rule as a sentence about it, if the job's spec shows that another
    field breaks the rule. CEL always reports `path`.
    """
    reads: tuple[str, ...] = ()
    """Fields that the Python reads; omitted if the CEL names them."""
    schema: Mapping[str, JsonValue] = field(default_factory=dict)
    """Schema keywords at `path` that express as much of the rule as possible."""
    schema_around: Mapping[str, JsonValue] = field(default_factory=dict)
    """Schema keywords of the object around the field, if CEL cannot look into the field."""

    @cached_property
    def holds(self) -> Holds:
        """Test of a spec."""
        if self.test is not None:
            return self.test
        assert self.cel is not None, f"{self.name} has CEL or a test"
        return predicate(self.cel)

    def reported(self, spec: FineTuneJobSpec) -> tuple[str, str]:
        """Return the field to report for `spec`, which breaks the rule, and the sentence about it."""
        return (self.cause(spec) if self.cause else None) or (self.path, self.text)

    @property
    def fields_read(self) -> tuple[str, ...]:
        """Paths from `spec` that the rule depends on."""
        return self.reads or tuple(
            dict.fromkeys(re.findall(r"self\.([A-Za-z.]*[A-Za-z])(?![A-Za-z(])", self.cel or ""))
        )


def loops(spec: FineTuneJobSpec) -> bool:
    """Return True if the built-in loop trains."""
    return spec.training is not None and spec.script is None


def is_one_of(tasks: tuple[Task, ...]) -> str:
    """Return CEL: the job's task is one of these."""
    return f"self.task in [{', '.join(repr(task) for task in tasks)}]"


NO_LOOP = "!has(self.training) || has(self.training.script)"
"""CEL of `not loops(spec)`."""
