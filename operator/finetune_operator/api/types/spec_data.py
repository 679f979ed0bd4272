"""The model to start from, the rows to learn from, and how rows become tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from finetune_contract.stage_pods import preparing_pods
from finetune_operator.api.types.field_types import Auto, SpecModel, Text, Uri


class AdapterSpec(SpecModel):
    """Parameter-efficient fine-tuning."""

    method: Literal["none", "lora", "qlora", "dora"] = Field(
        default="none",
        description="How weights are adapted: lora, dora, or qlora, which is lora beside weights in 4 bits. Default "
        "none: all weights are trained.",
    )
    rank: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=16,
        description="Rank of the update matrices, a count. Default 16. Used only with a method other than none.",
    )
    alpha: Annotated[float, Field(gt=0, le=65536)] = Field(
        default=32.0, description="Scale of the update; the effective factor is alpha / rank. Default 32."
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.05, description="Dropout on the adapter's input, a share from 0 to below 1. Default 0.05."
    )
    target_modules: Auto | Annotated[tuple[Text, ...], Field(min_length=1, max_length=64)] = Field(
        default="auto",
        description="Names of the layers to adapt, or auto (the default) for all linear layers of the blocks.",
    )


class ModelSpec(SpecModel):
    """The model to start from."""

    uri: Uri = Field(
        description="Where the model is: hf://org/name, or pvc://claim/path in a cluster; without one file:///path, "
        "file://path relative to the job file's folder, and pkg://python_package/folder. s3://, gs:// and az:// are "
        "not supported yet. Required."
    )
    revision: Text = Field(
        default="main",
        description="Branch, tag or commit of a Hub model. Default main; status pins it to a commit. "
        "Not used by other schemes.",
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Run Python code that comes with the model. Default false. Refused unless the "
        "cluster's administrator "
        "allows the repository.",
    )
    adapter: AdapterSpec = Field(
        default=AdapterSpec(), description="Adapter training; left out: all weights are trained."
    )


class SplitsSpec(SpecModel):
    """Names of the splits."""

    train: Text | None = Field(
        default=None,
        description="Split (or file stem) to train on, Hub slices such as train[:10%] included. Left "
        "out: the split named "
        "train, or the only file.",
    )
    validation: Text | None = Field(
        default=None,
        description="Split measured during training. Left out: the split named validation if there "
        "is one, else 5 % of train, "
        "set aside with the seed.",
    )
    test: Text | None = Field(
        default=None,
        description="Split that evaluate and predict use. Left out: the split named test if there is "
        "one, else validation.",
    )


class ColumnsSpec(SpecModel):
    """Names of the columns by role; which ones a task uses is in the task's description."""

    text: Text | None = Field(
        default=None,
        description="Input text. Left out: text. Used by text-classification, text-generation and masked-lm.",
    )
    text_pair: Text | None = Field(
        default=None, description="Second text of a pair. Left out: there is no pair. Used by text-classification."
    )
    label: Text | None = Field(
        default=None,
        description="Class as a word or a whole number, a list of classes, or a fraction. Left out: label. Used by "
        "text-classification.",
    )
    tokens: Text | None = Field(
        default=None, description="List of words. Left out: tokens. Used by token-classification."
    )
    tags: Text | None = Field(
        default=None, description="List of tags, one a word. Left out: tags. Used by token-classification."
    )
    question: Text | None = Field(default=None, description="Question. Left out: question. Used by question-answering.")
    context: Text | None = Field(default=None, description="Paragraph. Left out: context. Used by question-answering.")
    answers: Text | None = Field(default=None, description="Answers. Left out: answers. Used by question-answering.")
    source: Text | None = Field(
        default=None,
        description="Text to turn, or prompt. Left out: source; in text-generation no prompts. Used by "
        "text-generation, summarization and translation.",
    )
    target: Text | None = Field(
        default=None,
        description="Wanted text. Left out: target. Used by text-generation with source, by summarization and "
        "translation.",
    )
    messages: Text | None = Field(
        default=None,
        description="Conversation as a list of messages with role and content. Left out: none. Used by "
        "text-generation.",
    )
    prompt: Text | None = Field(
        default=None,
        description="Text to answer, or a conversation as in messages. Left out: prompt. Used by preference-tuning.",
    )
    chosen: Text | None = Field(
        default=None,
        description="The better answer, a text, or behind a conversation a list with one message. Left out: chosen. "
        "Used by preference-tuning.",
    )
    rejected: Text | None = Field(
        default=None, description="The worse answer, like chosen. Left out: rejected. Used by preference-tuning."
    )


class DatasetSpec(SpecModel):
    """Rows to train, evaluate or predict on."""

    uri: Uri = Field(
        description="Where the data are: hf://org/name, or a folder, file or glob of jsonl, json, csv, tsv, txt (a row "
        "a line), parquet or arrow behind any scheme, all but the last two also with .gz, .zst, .bz2 or .xz; "
        "file://path without a third slash is relative to the job file's folder. s3://, gs:// and az:// are not "
        "supported yet. Required."
    )
    config: Text | None = Field(
        default=None, description="Configuration of a Hub data set, as glue has mnli. Left out: its default one."
    )
    splits: SplitsSpec = Field(
        default=SplitsSpec(), description="Names of the splits; left out: train, validation, test."
    )
    columns: ColumnsSpec = Field(
        default=ColumnsSpec(), description="Names of the columns; left out: the task's own names."
    )
    labels: Annotated[dict[str, Text], Field(max_length=1024)] = Field(
        default={},
        description='Value in the label column -> name of the label, as in {"-1": negative, "1": positive}; several '
        "values may share a name. Each value of the data must be in it. Left out: the values are the names, or class "
        "ids where they count from 0 without gaps. Used by text-classification; not used in predict.dataset.",
    )


class PreparationSpec(SpecModel):
    """Conversion of rows to tokens."""

    engine: Literal["auto", "job", "spark"] = Field(
        default="auto",
        description="What prepares the data, with the same result. Default auto: processes of one machine; job: pods "
        "on many nodes, which share the workspace; spark: partitions of Spark.",
    )
    workers: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1,
        description="Processes that tokenise (pods with engine job, partitions with spark), a count. Default 1.",
    )
    max_length: Annotated[int, Field(ge=2, le=10_000_000)] | None = Field(
        default=None,
        description="Longest input in tokens; longer rows are cut. Left out: the model's limit, at most 512.",
    )
    packing: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Whether several rows share one sequence. Default auto: only for tasks that gain from it, and not "
        "with parallelism.sequence.",
    )
    stride: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        default=None,
        description="Overlap of the windows of a long row in tokens, for tasks that cut rows into windows "
        "(token-classification, question-answering). Left out: 128, or a quarter of a window when that is less.",
    )

    @property
    def pods(self) -> int:
        """Pods that prepare in a cluster; Spark's driver is one of them."""
        return preparing_pods(self.engine, self.workers)
