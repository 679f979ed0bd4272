"""Settings of `job.json` for the model and the rows: their sources, columns and tokenisation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from finetune_contract.contract_models import Order
from finetune_contract.stage_pods import preparing_pods


class ModelSource(Order):
    """Source of the model."""

    uri: str
    revision: str = "main"
    trust_remote_code: bool = False


class Columns(Order):
    """Names of the data set's columns by their role in the task; None: not used."""

    text: str | None = None
    text_pair: str | None = None
    label: str | None = None
    tokens: str | None = None
    tags: str | None = None
    question: str | None = None
    context: str | None = None
    answers: str | None = None
    source: str | None = None
    target: str | None = None
    messages: str | None = None
    prompt: str | None = None
    chosen: str | None = None
    rejected: str | None = None


class Splits(Order):
    """Split names as the user wrote them; None: the split with the role's own name, if any."""

    train: str | None = None
    validation: str | None = None
    test: str | None = None


class DataSource(Order):
    """Source of the rows."""

    uri: str
    config: str | None = None
    splits: Splits = Splits()
    columns: Columns = Columns()
    labels: dict[str, str] = Field(default_factory=dict, exclude_if=lambda labels: not labels)
    """Value of the label column as text -> label name; empty: the values are the names. Omitted if empty, so that
    images that do not know the field read such jobs.
    """
    label_separator: str | None = Field(default=None, min_length=1, exclude_if=lambda separator: separator is None)
    """Text between the labels of a row in the label column; None: a text is one label."""


class Preparation(Order):
    """Tokenisation of the rows."""

    max_length: int | None = Field(default=None, gt=0)
    """Truncation length in tokens; None: the model's limit, at most 512."""
    stride: int | None = Field(default=None, ge=0)
    """Tokens that neighbouring windows of a long row share, in tasks that cut rows into windows; None: 128, or a
    quarter of the window if that is less.
    """
    engine: Literal["local", "job", "spark"] = "local"
    """Executor of tokenisation: processes of this machine, the pods of an Indexed Job, or Spark."""
    workers: int = Field(default=1, ge=1)
    """Tokenising processes; partitions with Spark."""
    packing: bool = False
    """True if rows of the train split share sequences of `max_length` tokens, which are then the units of a batch."""
    packing_asked: bool = Field(default=False, exclude_if=lambda asked: not asked)
    """True if the job asks for packing and names no columns; False: rows that turn out to be no plain text are not
    packed.
    """

    chat_template: Literal["never", "always"] = Field(default="never", exclude_if=lambda chat: chat == "never")
    """always: a prompt (`source`) is a message of the user, and its continuation (`target`) the reply to it."""

    @property
    def pods(self) -> int:
        """Number of pods that run the stage in a cluster; Spark's driver is one of them."""
        return preparing_pods(self.engine, self.workers)
