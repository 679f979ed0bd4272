"""The model to start from, the rows to learn from, and how rows become tokens."""

from typing import Annotated, Literal

from pydantic import Field

from finetune_contract.stage_pods import preparing_pods
from finetune_operator.spec.types.field_types import Auto, ReadUri, SpecModel, Text


class AdapterSpec(SpecModel):
    """Parameter-efficient fine-tuning."""

    method: Literal["none", "lora", "qlora", "dora"] = Field(
        default="none",
        description="Adapter method: lora, dora, or qlora (lora with the base weights in 4 bits). Defaults to none: "
        "all weights are trained.",
    )
    rank: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=16,
        description="Rank of the update matrices, a count. Used only if method is not none. Defaults to 16.",
    )
    alpha: Annotated[float, Field(gt=0, le=65536)] = Field(
        default=32.0, description="Scale of the update; the effective factor is alpha / rank. Defaults to 32."
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        default=None,
        description="Dropout probability on the adapter's input, from 0 to below 1. Defaults to 0.05, for "
        "preference-tuning to 0.",
    )
    target_modules: Auto | Annotated[tuple[Text, ...], Field(min_length=1, max_length=64)] = Field(
        default="auto",
        description="Names of the layers to adapt. Defaults to auto: all linear layers of the blocks.",
    )


class ModelSpec(SpecModel):
    """The model to start from."""

    uri: ReadUri = Field(
        description="Location of the model: hf://org/name, or pvc://claim/path in a cluster; without a cluster also "
        "file:///path, file://path relative to the job file's folder, and pkg://python_package/folder. s3://, "
        "gs:// and az:// are not supported yet. Required."
    )
    revision: Text = Field(
        default="main",
        description="Branch, tag or commit of a Hub model; the status pins it to a commit. Not used by other schemes. "
        "Defaults to main.",
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Whether to run Python code that comes with the model. Refused unless the cluster's administrator "
        "allows the repository. Defaults to false.",
    )
    adapter: AdapterSpec = Field(
        default=AdapterSpec.model_construct(), description="Adapter training. If unset, all weights are trained."
    )


class SplitsSpec(SpecModel):
    """Names of the splits."""

    train: Text | None = Field(
        default=None,
        description="Split (or file stem) to train on; Hub slices such as train[:10%] are allowed. Defaults to the "
        "split named train, or the only file.",
    )
    validation: Text | None = Field(
        default=None,
        description="Split to evaluate during training. Defaults to the split named validation if there is one, else "
        "to 5 % of train, selected with the seed.",
    )
    test: Text | None = Field(
        default=None,
        description="Split for the evaluate and predict stages. Defaults to the split named test if there is one, else"
        " to validation.",
    )


class ColumnsSpec(SpecModel):
    """Names of the columns by role; which ones a task uses is in the task's description."""

    text: Text | None = Field(
        default=None,
        description="Column of the input text. Used by text-classification, text-generation and masked-lm. Defaults to"
        " text.",
    )
    text_pair: Text | None = Field(
        default=None,
        description="Column of the second text of a pair. Used by text-classification. If unset, there are no pairs.",
    )
    label: Text | None = Field(
        default=None,
        description="Column of the class: a word or an integer, a list of classes, or a fraction. Used by text-"
        "classification. Defaults to label.",
    )
    tokens: Text | None = Field(
        default=None, description="Column of the list of words. Used by token-classification. Defaults to tokens."
    )
    tags: Text | None = Field(
        default=None,
        description="Column of the list of tags, one per word. Used by token-classification. Defaults to tags.",
    )
    question: Text | None = Field(
        default=None, description="Column of the question. Used by question-answering. Defaults to question."
    )
    context: Text | None = Field(
        default=None,
        description="Column of the paragraph with the answer. Used by question-answering. Defaults to context.",
    )
    answers: Text | None = Field(
        default=None, description="Column of the answers. Used by question-answering. Defaults to answers."
    )
    source: Text | None = Field(
        default=None,
        description="Column of the source text, or prompt. Used by text-generation, summarization and translation. "
        "Defaults to source; for text-generation, to no prompts.",
    )
    target: Text | None = Field(
        default=None,
        description="Column of the target text. Used by summarization, translation, and text-generation with source. "
        "Defaults to target.",
    )
    messages: Text | None = Field(
        default=None,
        description="Column of the conversation, a list of messages with role and content. Used by text-generation. If"
        " unset, there are no conversations.",
    )
    prompt: Text | None = Field(
        default=None,
        description="Column of the prompt: a text, or a conversation as in messages. Used by preference-tuning. "
        "Defaults to prompt.",
    )
    chosen: Text | None = Field(
        default=None,
        description="Column of the preferred answer: a text, or after a conversation a list with one message. Used by "
        "preference-tuning. Defaults to chosen.",
    )
    rejected: Text | None = Field(
        default=None,
        description="Column of the rejected answer, in the form of chosen. Used by preference-tuning. Defaults to "
        "rejected.",
    )


class DatasetSpec(SpecModel):
    """Rows to train, evaluate or predict on."""

    uri: ReadUri = Field(
        description="Location of the data: hf://org/name, or a folder, file or glob with any scheme. Formats: parquet,"
        " arrow, and jsonl, json, csv, tsv or txt (one row per line), the latter five also compressed as "
        ".gz, .zst, .bz2 or .xz. file://path without a third slash is relative to the job file's folder. "
        "s3://, gs:// and az:// are not supported yet. Required."
    )
    config: Text | None = Field(
        default=None,
        description="Configuration of a Hub data set, e.g. mnli of glue. Defaults to the data set's default "
        "configuration.",
    )
    splits: SplitsSpec = Field(
        default=SplitsSpec.model_construct(), description="Names of the splits. Defaults to train, validation and test."
    )
    columns: ColumnsSpec = Field(
        default=ColumnsSpec.model_construct(),
        description="Names of the columns. Defaults to the column names of the task.",
    )
    labels: Annotated[dict[str, Text], Field(max_length=1024)] = Field(
        default={},
        description='Map from values of the label column to label names, e.g. {"-1": negative, "1": positive}; several'
        " values may share a name. Every value in the data must be listed. If unset, the values are the "
        "names, or class ids if they count from 0 without gaps. Used by text-classification; not used in "
        "predict.dataset.",
    )
    label_separator: Text | None = Field(
        default=None,
        description='Separator of several labels in one text, e.g. ";" for "movie; long". The parts are stripped, an '
        "empty text has no label, and a repeated label counts once. If unset, a text is one label. Used by "
        "text-classification; not used in predict.dataset.",
    )


class PreparationSpec(SpecModel):
    """Conversion of rows to tokens."""

    engine: Literal["auto", "job", "spark"] = Field(
        default="auto",
        description="Engine that prepares the data; all give the same result. auto: processes of one machine; job: "
        "pods on several nodes, which share the workspace; spark: partitions of Spark. Defaults to auto.",
    )
    workers: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1,
        description="Processes that tokenize (pods for engine job, partitions for spark), a count. Defaults to 1.",
    )
    max_length: Annotated[int, Field(ge=2, le=10_000_000)] | None = Field(
        default=None,
        description="Maximum length of an input in tokens; longer rows are truncated. Defaults to the model's limit, "
        "at most 512.",
    )
    packing: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Whether several rows are packed into one sequence. Defaults to auto: only for tasks that benefit "
        "from it, and not with parallelism.sequence.",
    )
    chat_template: Literal["never", "always"] = Field(
        default="never",
        description="Whether the chat template of the model's tokenizer also formats rows of source and target, as a "
        "message of the user and the reply to it. Conversations always use it. Defaults to never: the texts alone.",
    )
    stride: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        default=None,
        description="Overlap of the windows of a long row, in tokens, for tasks that split rows into windows (token-"
        "classification, question-answering). Defaults to 128, or a quarter of a window if that is less.",
    )

    @property
    def pods(self) -> int:
        """Pods that prepare in a cluster; Spark's driver is one of them."""
        return preparing_pods(self.engine, self.workers)
