"""Predictions for a Spark DataFrame: the rows of the stage `predict`, answered in the Python processes of executors.

`predict` is for whole DataFrames, `predict_udf` for expressions. Both use the stage's code, so that a row gets the same
answer everywhere. Executors need this package and the model under the same name: a folder that all machines mount, or
hf://.

A wrong model, task or column is refused on the driver, before Spark starts work. A row that cannot be answered never
fails the job: its answer is null, and `reason` holds the cause.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import pyarrow as pa

from finetune_contract.choices import Device, InferencePrecision, Task
from finetune_contract.data_settings import Columns, ModelSource, Preparation
from finetune_contract.inference_settings import BATCH_TOKENS, Generation, Prediction
from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError, needed_library
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data.file_formats import json_column
from finetune_trainer.data.row_shards import RowShard, ShardKey, rows_of_table
from finetune_trainer.models.loading import load_config
from finetune_trainer.predict.answering import ROW, Answerer, RequestedColumns, coding_of
from finetune_trainer.predict.runner import Means, used_model
from finetune_trainer.prepare.prepare import labels_of_model
from finetune_trainer.prepare.shards import Encoder
from finetune_trainer.tasks.task_registry import task_of

if TYPE_CHECKING:
    from typing import Unpack

    import pandas as pd
    from pyspark.sql import DataFrame

REASON = "reason"
"""Answer column with the cause of a missing answer, null where there is an answer."""
_SETTING = "predict"
"""Prefix of settings' paths in errors."""
_LISTS = {"tokens": pa.list_(pa.string()), "messages": pa.json_()}
"""Types of columns that hold lists, by role; a prompt may be text, or a list of messages."""


class PredictOptions(TypedDict, total=False):
    """Keyword arguments of `predict` and `predict_udf` that have a default."""

    max_length: int | None
    """Limit of tokens in a feature; None, the default: the model's limit, at most 512."""
    stride: int | None
    """Tokens that windows of a long row share, for tasks that have windows; None, the default: as in a job."""
    generation: Generation
    """Settings for text generation."""
    batch_tokens: int
    """Limit of padded tokens in a batch; default 2,048 on CPUs and 16,384 on GPUs."""
    precision: InferencePrecision
    """Precision of inference; default fp32."""
    device: Device
    """cpu, the default, or cuda: then a task of Spark has one GPU, by `spark.task.resource.gpu.amount`."""
    threads: int | None
    """CPU threads of a Python process; None, the default: as many as a task of Spark has cores, `spark.task.cpus`."""
    revision: str
    """Revision of a Hub model; default main."""
    trust_remote_code: bool
    """True if code that comes with the model may run; default false."""


def predict(
    data: DataFrame, model: str, *, task: Task, columns: Mapping[str, str], **how: Unpack[PredictOptions]
) -> DataFrame:
    """Return `data` with the columns of the task's answers and `reason`, which is null for a row with an answer.

    `model`: a folder that `save_pretrained` wrote, or a URI (hf://, file://). `columns`: role in the task -> column of
    `data`, as in `spec.predict.dataset.columns` of a job; targets are not read. Nothing runs before an action.

    Raise StageError MODEL or CONFIG for an invalid model or setting, DATA `MissingColumn` for a column that `data`
    lacks and `ColumnNameTaken` for one with the name of an answer.
    """
    answering = _Answering.of(model, task, columns, how)
    _check_columns(data.columns, answering)
    taken = [name for name in answering.schema().names if name in data.columns]
    if taken:
        raise StageError(
            FailureClass.DATA,
            "ColumnNameTaken",
            f"The data have the column {', '.join(taken)}, which predictions of {task} write.",
            f'Rename it: data.withColumnRenamed("{taken[0]}", "given_{taken[0]}").',
        )
    struct = "__answer__"
    inputs = [data[_quoted(name)] for name in answering.inputs.values()]
    return data.withColumn(struct, _udf(answering)(*inputs)).select("*", f"{struct}.*").drop(struct)


def predict_udf(
    model: str, *, task: Task, columns: Sequence[str] = ("text",), **how: Unpack[PredictOptions]
) -> Callable[..., Any]:
    """Return a pandas UDF that answers rows with a struct: the task's columns of predictions, and `reason`.

    `columns`: the roles of its arguments, in order; the rest as `predict`. The model is loaded once for each Python
    process of Spark, which is reused from task to task.

    Raise StageErrors of the model and the settings, as `predict`.
    """
    return _udf(_Answering.of(model, task, {role: role for role in columns}, how))


def _check_columns(names: Sequence[str], answering: _Answering) -> None:
    for role, name in answering.inputs.items():
        if name not in names:
            raise StageError(
                FailureClass.DATA,
                "MissingColumn",
                f"{_SETTING}.columns.{role} is {name!r}; the data have the columns {', '.join(names)}.",
                "Set it to a column of the data.",
            )


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


# ---------------------------------------------------------------------------------------------------------- the answers


@dataclass(frozen=True)
class _Answering:
    """Job and columns of the answers; sent to the executors as JSON."""

    job: TrainerJob
    columns: Columns
    threads: int | None

    @classmethod
    def of(cls, model: str, task: Task, columns: Mapping[str, str], how: PredictOptions) -> _Answering:
        """Build it; raise StageError CONFIG for a column that the task lacks or does not read, or for the model."""
        unknown = [role for role in columns if role not in Columns.model_fields]
        if unknown:
            raise StageError(
                FailureClass.CONFIG,
                "UnknownColumn",
                f"{_SETTING}.columns has {', '.join(unknown)}; supported are {', '.join(Columns.model_fields)}.",
                "Set the columns by their role in the task, as in a job.",
            )
        device = how.get("device", "cpu")
        job = TrainerJob(
            name="spark",
            task=task,
            model=ModelSource(
                uri=model if "://" in model else Path(model).absolute().as_uri(),
                revision=how.get("revision", "main"),
                trust_remote_code=how.get("trust_remote_code", False),
            ),
            preparation=Preparation(max_length=how.get("max_length"), stride=how.get("stride")),
            generation=how.get("generation", Generation()),
            predict=Prediction(
                device=device,
                batch_tokens=how.get("batch_tokens", BATCH_TOKENS[device]),
                precision=how.get("precision", "fp32"),
            ),
        )
        made = cls(job, Columns(**columns), how.get("threads"))
        task_of(job).encoding.columns(made.columns, _SETTING, labelled=False)
        coding_of(job)
        return made

    @property
    def inputs(self) -> dict[str, str]:
        """Role of each column that is read -> its name."""
        return {role: name for role, name in self.columns if name is not None}

    def schema(self) -> pa.Schema:
        """Return the columns of the answers. Raise StageError MODEL `NoHead`."""
        task = task_of(self.job)
        schema = task.description.answer_schema(labels_of_model(self.job, task.head, load_config(self.job)))
        return schema.append(pa.field(REASON, pa.string()))

    def text(self) -> tuple[str, str, int | None]:
        """Serialize for another process."""
        return self.job.model_dump_json(), self.columns.model_dump_json(), self.threads


@lru_cache(maxsize=1)
def _answerer(job_text: str, columns_text: str, threads: int | None) -> Answerer:
    """Load the model once a Python process, which Spark keeps from task to task."""
    _use_threads(threads)
    job, columns = TrainerJob.model_validate_json(job_text), Columns.model_validate_json(columns_text)
    task, means = task_of(job), Means.of(job.predict)
    if means.device == "cuda":
        _use_gpu()
    model, _ = used_model(job, JobPaths(Path()), means.precision)  # nothing is trained: no file of a job is read
    encoder = Encoder(task, coding_of(job), packing=False)
    labels = labels_of_model(job, task.head, model.config)
    return Answerer(job, encoder, model, labels, means, RequestedColumns(columns, _SETTING, {}))


def _use_threads(threads: int | None) -> None:
    import torch
    from pyspark import TaskContext

    context = TaskContext.get()
    count = threads or (1 if context is None else context.cpus())
    torch.set_num_threads(count)
    os.environ["RAYON_NUM_THREADS"] = str(count)  # of the tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if count > 1 else "false"


def _use_gpu() -> None:
    """Use the GPU that Spark has assigned to the task, where it assigns GPUs."""
    import torch
    from pyspark import TaskContext

    context = TaskContext.get()
    given = None if context is None else context.resources().get("gpu")
    if given is not None and torch.cuda.is_available():
        torch.cuda.set_device(int(given.addresses[0]))


def answers_to(table: pa.Table, answerer: Answerer, schema: pa.Schema) -> pa.Table:
    """Return one row of `schema` for each row of the table, in its order."""
    if not len(table):
        return schema.empty_table()
    rows = rows_of_table(table)
    shard = RowShard(ShardKey(0, 0), "the DataFrame", len(table), lambda: rows)
    answers = answerer.answers(shard, rows, NoProgress())
    reasons: list[str | None] = [None] * len(table)
    for row in answers.bad_rows:
        reasons[row.number] = row.reason
    names = schema.names[:-1]
    if not len(answers.table):
        nothing = {name: pa.nulls(len(table), schema.field(name).type) for name in names}
        return pa.table({**nothing, REASON: reasons}, schema=schema)
    place = np.full(len(table), -1)
    place[answers.table[ROW].to_numpy()] = np.arange(len(answers.table))
    taken = answers.table.select(names).take(pa.array(place, mask=place < 0))
    return taken.append_column(REASON, pa.array(reasons, pa.string())).cast(schema)


# ---------------------------------------------------------------------------------------------------------------- Spark


_INSTALL = "Install finetune-trainer[spark] on the driver and where executors run."


def _udf(answering: _Answering) -> Callable[..., Any]:
    with needed_library("pyspark", "SparkMissing", "pyspark, which finetune_trainer.spark needs", _INSTALL):
        from pyspark.sql.functions import pandas_udf
        from pyspark.sql.pandas.types import from_arrow_schema
    schema = answering.schema()
    batches = _Batches(answering.text(), tuple(answering.inputs), schema.serialize().to_pybytes())
    made: Callable[..., Any] = pandas_udf(batches, from_arrow_schema(schema))
    return made


class _Batches:
    """Function of a partition: batches of Spark's Arrow format in, as many rows of answers out."""

    def __init__(self, answering: tuple[str, str, int | None], roles: tuple[str, ...], schema: bytes) -> None:
        import pandas as pd

        self._answering = answering
        self._roles = roles
        self._schema = schema
        self.__name__ = "predict"  # of the UDF in Spark's plans
        # Spark reads the kind of the UDF from these: a call with several columns gets them as a tuple.
        given = pd.Series if len(roles) == 1 else tuple[pd.Series, ...]
        self.__annotations__ = {"batches": Iterator[given], "return": Iterator[pd.DataFrame]}  # type: ignore[valid-type]

    def __call__(self, batches: Iterator[pd.Series | tuple[pd.Series, ...]]) -> Iterator[pd.DataFrame]:
        answerer, schema = _answerer(*self._answering), pa.ipc.read_schema(pa.py_buffer(self._schema))
        columns = dict(answerer.requested.columns)
        for batch in batches:
            given = batch if isinstance(batch, tuple) else (batch,)
            table = pa.table(
                {columns[role]: _arrow(role, series) for role, series in zip(self._roles, given, strict=True)}
            )
            yield _frame(answers_to(table, answerer, schema))


def _arrow(role: str, values: pd.Series) -> pa.Array:
    plain = [_plain(value) for value in values]
    if role in ("messages", "prompt") and any(isinstance(value, list) for value in plain):
        return json_column(plain)
    array = pa.array(plain, from_pandas=True)
    # A missing value is null, also where all rows of a batch lack one
    return array.cast(_LISTS.get(role, pa.string())) if pa.types.is_null(array.type) else array


def _plain(value: Any) -> Any:
    """Convert for Arrow: Spark passes arrays as NumPy's, and structs as tuples with names."""
    if isinstance(value, np.ndarray | list):
        return [_plain(item) for item in value]
    return value.asDict(recursive=True) if hasattr(value, "asDict") else value


def _frame(table: pa.Table) -> pd.DataFrame:
    """Convert to Python's values, which keep nulls, whole numbers and structs as they are."""
    import pandas as pd

    return pd.DataFrame({name: pd.Series(table[name].to_pylist(), dtype=object) for name in table.column_names})
