"""`finetune_trainer.spark`: a DataFrame's rows get the answers of the stage predict."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from finetune_contract.inference_settings import Generation
from finetune_contract.layout import FailureClass, JobPaths
from finetune_trainer import spark
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.predict import predict as stage
from trainer_support.spark_submit import skip_without_spark
from trainer_support.tasks import predictions, task_job, texts, write_decoder, write_encoder_decoder, write_lines

pytest.importorskip("pyspark", reason="pyspark is not installed (finetune-trainer[spark])")

WORDS = ["the", "cat", "sees", "dog", "a", "house"]
LABELS = ["bad", "very good"]
TEXTS = ["the cat sees", "", "a dog sees the house " * 9, "🙂\x00\r\n", *(row["text"] for row in texts(8, 3))]
WRITTEN = {"max_new_tokens": 4}


@dataclass(frozen=True)
class Case:
    """A task, its model, its rows, and a row that cannot be answered, with the reason."""

    task: str
    model: str
    rows: list[dict[str, Any]]
    bad: dict[str, Any]
    reason: str = "NullText"
    changes: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.task} {'+'.join(self.rows[0])}"


def of_text(task: str, model: str, role: str, **changes: Any) -> Case:
    return Case(task, model, [{role: text} for text in TEXTS], {role: None}, changes=changes)


CASES = [
    of_text("text-classification", "classes", "text"),
    Case(
        "text-classification",
        "classes",
        [{"text": text, "text_pair": "a house"} for text in TEXTS],
        {"text": "the cat", "text_pair": None},
    ),
    of_text("text-classification", "several", "text"),
    of_text("text-classification", "number", "text"),
    Case(
        "token-classification",
        "tags",
        [{"tokens": text.split() or ["a"]} for text in TEXTS],
        {"tokens": None},
        "NoWords",
    ),
    Case(
        "question-answering",
        "spans",
        [{"question": "the cat", "context": f"a house {text}"} for text in TEXTS],
        {"question": None, "context": "a"},
    ),
    of_text("masked-lm", "masks", "text"),
    of_text("summarization", "t5", "source", generation=WRITTEN),
    of_text("translation", "t5", "source", generation=WRITTEN),
    of_text("text-generation", "llama", "text", generation=WRITTEN),
    Case(
        "text-generation",
        "chat",
        [{"messages": [{"role": "user", "content": text}]} for text in TEXTS if text],
        {"messages": None},
        "NoMessages",
        {"generation": WRITTEN},
    ),
    of_text("preference-tuning", "llama", "prompt", generation=WRITTEN),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> dict[str, Path]:
    from transformers import (
        AutoConfig,
        AutoModelForMaskedLM,
        AutoModelForQuestionAnswering,
        AutoModelForTokenClassification,
    )

    folder = tmp_path_factory.mktemp("models")

    def bert(name: str, head: Any = None, **how: Any) -> Path:
        made = tiny_bert(folder / name, words=WORDS, initializer_range=0.5, **how)
        if head is not None:
            head.from_config(AutoConfig.from_pretrained(made)).save_pretrained(made)
        return made

    chat = write_decoder(folder / "chat")
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    (chat / "chat_template.jinja").write_text(template)
    return {
        "classes": bert("classes", labels=LABELS),
        "several": bert("several", labels=LABELS, problem_type="multi_label_classification"),
        "number": bert("number", labels=["value"], problem_type="regression"),
        "tags": bert("tags", AutoModelForTokenClassification, id2label={0: "O", 1: "B-x"}, label2id={"O": 0, "B-x": 1}),
        "spans": bert("spans", AutoModelForQuestionAnswering),
        "masks": bert("masks", AutoModelForMaskedLM),
        "llama": write_decoder(folder / "llama"),
        "chat": chat,
        "t5": write_encoder_decoder(folder / "t5"),
    }


def of_stage(case: Case, model: Path, folder: Path) -> list[dict[str, Any]]:
    """Return the stage's output for the rows, without their numbers."""
    file = write_lines(folder / "rows.jsonl", case.rows)
    source = {"uri": f"file://{file}", "columns": {role: role for role in case.rows[0]}}
    means = {"device": "cpu", "batch_tokens": 512, "dataset": source}
    how = {"preparation": {"max_length": 24}, **case.changes}
    job = task_job(case.task, model, file, (), predict=means, **how).model_copy(update={"dataset": None})
    stage.predict(job, JobPaths(folder / "job"), NoProgress())
    return [
        {name: value for name, value in row.items() if name != "row"} for row in predictions(JobPaths(folder / "job"))
    ]


def close(row: dict[str, Any]) -> Any:
    """Return the row with numbers that compare equal to within 1e-5."""
    if isinstance(row, dict):
        return {name: close(value) for name, value in row.items()}
    if isinstance(row, list):
        return [close(value) for value in row]
    return pytest.approx(row, abs=1e-5) if isinstance(row, float) else row


def how_of(case: Case) -> dict[str, Any]:
    generation = {"generation": Generation(**case.changes["generation"])} if case.changes else {}
    return {"max_length": 24, "batch_tokens": 512, **generation}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_udf_answers_as_the_stage_does(case: Case, models: dict[str, Path], tmp_path: Path) -> None:
    import pandas as pd

    made: Any = spark.predict_udf(str(models[case.model]), task=case.task, columns=tuple(case.rows[0]), **how_of(case))
    rows = [*case.rows[:3], case.bad, *case.rows[3:]]
    columns = tuple(pd.Series([row[role] for row in rows], dtype=object) for role in case.rows[0])
    bad = tuple(pd.Series([case.bad[role]], dtype=object) for role in case.bad)
    batches = [columns, bad] if len(columns) > 1 else [columns[0], bad[0]]
    first, second = (frame.to_dict("records") for frame in made.func(iter(batches)))
    names = made.returnType.names
    nothing = {**dict.fromkeys(names), "reason": case.reason}
    wanted = [{**row, "reason": None} for row in of_stage(case, models[case.model], tmp_path)]
    assert first == close([*wanted[:3], nothing, *wanted[3:]])
    assert second == [nothing]
    assert list(first[0]) == names


def refused(model: Path, **how: Any) -> StageError:
    with pytest.raises(StageError) as caught:
        spark.predict_udf(str(model), **{"task": "text-classification", **how})
    return caught.value


def test_wrong_settings_are_refused_before_spark_runs(models: dict[str, Path], tmp_path: Path) -> None:
    classes = models["classes"]
    assert refused(tmp_path / "none").reason == "ModelNotFound"
    assert refused(models["llama"]).reason == "NoHead"
    assert refused(classes, columns=("txt",)).message.startswith(
        "predict.columns has txt; supported are text, text_pair,"
    )
    assert refused(classes, columns=("text", "tokens")).reason == "ColumnOfAnotherTask"
    assert refused(classes, columns=()).message.startswith("predict.columns.text is not set")
    assert refused(classes, max_length=4096).reason == "MaxLengthTooLong"


def test_missing_spark_is_refused_with_a_hint(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.sql.functions", None)
    error = refused(models["classes"])
    assert (error.failure_class, error.reason) == (FailureClass.CONFIG, "SparkMissing")


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    skip_without_spark()
    from pyspark.sql import SparkSession

    here = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", "spark.ui.enabled": "false"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        made = SparkSession.builder.master("local[1]").config(map=here).getOrCreate()
        yield made
        made.stop()


@pytest.mark.slow
def test_documented_notebook_answers_a_dataframe(session: Any, models: dict[str, Path], tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "spark.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"spark": session, "MODEL": str(models["classes"])}
    exec(block, names)
    rows = [row.asDict(recursive=True) for row in names["answered"].collect()]
    case = Case("text-classification", "classes", [{"text": "the cat sees a dog"}], {"text": None})
    (wanted,) = of_stage(case, models["classes"], tmp_path)
    nothing = dict.fromkeys(wanted)
    assert rows == [
        {"id": 1, "review": "the cat sees a dog", **close(wanted), "reason": None},
        {"id": 2, "review": None, **nothing, "reason": "NullText"},
    ]
    assert [row.label for row in names["labels"].collect()] == [wanted["label"], None]
    with pytest.raises(StageError, match="is 'words'; the data have the columns id, review") as caught:
        spark.predict(names["reviews"], names["MODEL"], task="text-classification", columns={"text": "words"})
    assert caught.value.reason == "MissingColumn"
    taken = names["reviews"].withColumnRenamed("id", "label")
    with pytest.raises(StageError, match="The data have the column label") as caught:
        spark.predict(taken, names["MODEL"], task="text-classification", columns={"text": "review"})
    assert caught.value.reason == "ColumnNameTaken"
