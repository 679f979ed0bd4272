"""What `python -m finetune_trainer check` says of a job's data: of their first rows, and before anything is trained."""

from __future__ import annotations

from pydantic import Field

from finetune_contract.contract_models import Message
from finetune_contract.report import FailureReport


class TextLengths(Message):
    """Lengths of the texts of one column, or of a row as the tokenizer sees it."""

    mean: float = Field(ge=0)
    longest: int = Field(ge=0)


class CheckedSplit(Message):
    """The rows of one split that were read."""

    role: str
    """`train`, `validation`, `test` or `predict`."""
    name: str
    origin: str
    rows: int = Field(ge=0)
    whole: bool
    """Whether these are all rows."""
    columns: tuple[str, ...]
    """All that the split has, used or not."""
    labels: dict[str, int] = Field(default_factory=dict)
    """Label name -> rows; empty without labels."""
    words: dict[str, TextLengths] = Field(default_factory=dict)
    """Column of text -> its lengths in words."""
    characters: dict[str, TextLengths] = Field(default_factory=dict)
    """Column of text -> its lengths in characters."""
    tokens: TextLengths | None = None
    """Of a row; None where the tokenizer is not at hand without the model's libraries."""
    longer: int | None = None
    """Rows of more than `max_length` tokens."""
    estimated: bool = False
    """Whether `tokens` and `longer` are those of some of the rows, and `longer` is projected to all that were read."""


class CheckedData(Message):
    """What was found, good and bad."""

    splits: tuple[CheckedSplit, ...] = ()
    max_length: int | None = None
    """Most tokens of a row; None: not known."""
    long_rows: str = ""
    """What becomes of longer rows, as the end of a sentence."""
    notes: tuple[str, ...] = ()
    """Sentences for people."""
    problems: tuple[FailureReport, ...] = ()
    """What prepare would refuse."""
