"""Result of `python -m finetune_trainer check`: a job's data, judged by their first rows before anything is trained."""

from __future__ import annotations

from pydantic import Field

from finetune_contract.contract_models import Message
from finetune_contract.report import FailureReport


class TextLengths(Message):
    """Lengths of the texts of one column, or of a row in tokens."""

    mean: float = Field(ge=0)
    longest: int = Field(ge=0)


class CheckedSplit(Message):
    """Rows that were read of one split."""

    role: str
    """`train`, `validation`, `test` or `predict`."""
    name: str
    origin: str
    rows: int = Field(ge=0)
    whole: bool
    """True if these are all rows."""
    columns: tuple[str, ...]
    """All columns of the split, used or not."""
    labels: dict[str, int] = Field(default_factory=dict)
    """Label name -> rows; empty without labels."""
    words: dict[str, TextLengths] = Field(default_factory=dict)
    """Column of text -> its lengths in words."""
    characters: dict[str, TextLengths] = Field(default_factory=dict)
    """Column of text -> its lengths in characters."""
    tokens: TextLengths | None = None
    """Lengths of a row in tokens; None if the tokenizer is unavailable without the model's libraries."""
    longer: int | None = None
    """Rows of more than `max_length` tokens."""
    estimated: bool = False
    """True if `tokens` and `longer` come from a sample, with `longer` projected to all rows that were read."""


class CheckedData(Message):
    """Findings about the data, good and bad."""

    splits: tuple[CheckedSplit, ...] = ()
    max_length: int | None = None
    """Maximum tokens of a row; None: unknown."""
    long_rows: str = ""
    """Treatment of longer rows, as the end of a sentence."""
    notes: tuple[str, ...] = ()
    """Sentences for people."""
    problems: tuple[FailureReport, ...] = ()
    """Problems that prepare would refuse."""
