"""Folders of adapters for `finetune serve`: base, task and names, and the job of the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune_contract.trainer_job import TrainerJob
from finetune_operator.cli.commands.serve_command import _job_of_base, _with_serving
from finetune_operator.cli.local.adapter_folders import adapter_folder, is_adapter, named_adapters
from finetune_operator.cli.terminal.console import UsageError


def write_adapter(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "task_type": "SEQ_CLS", **config}))
    return folder


def write_model(folder: Path, name: str = "BertForSequenceClassification") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [name]}))
    return folder


def test_adapter_of_a_run_has_the_base_and_name_of_its_run(tmp_path: Path) -> None:
    write_adapter(tmp_path / "reviews/adapter", base_model_name_or_path="./gone")
    body = {"name": "reviews", "task": "text-classification", "model": {"uri": "hf://org/base", "revision": "v2"}}
    (tmp_path / "reviews/job.json").write_text(TrainerJob.model_validate(body).to_json())

    found = adapter_folder(str(tmp_path / "reviews"))

    assert (found.name, found.task) == ("reviews", "text-classification")
    assert TrainerJob.model_validate({**body, "model": found.base()}).model.revision == "v2"


@pytest.mark.parametrize(
    ("named", "uri"),
    [("../base", "file://{}/base"), ("{}/base", "file://{}/base"), ("org/base", "hf://org/base")],
)
def test_base_that_an_adapter_names_is_found(named: str, uri: str, tmp_path: Path) -> None:
    write_model(tmp_path / "base")
    folder = write_adapter(tmp_path / "mails", base_model_name_or_path=named.format(tmp_path))

    assert adapter_folder(str(folder)).base()["uri"] == uri.format(tmp_path)


def test_base_that_is_not_here_has_to_be_named(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "mails", base_model_name_or_path="./gone")

    with pytest.raises(UsageError, match=r"its base './gone' is not here; name it with --base"):
        adapter_folder(str(folder)).base()


def test_folder_with_a_model_is_no_adapter(tmp_path: Path) -> None:
    both = write_adapter(tmp_path / "both")
    assert is_adapter(str(both))
    (both / "config.json").write_text("{}")
    assert not is_adapter(str(both))
    assert not is_adapter("hf://org/name")


def test_card_decides_the_task(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / "finetune.json").write_text(json.dumps({"task": "token-classification"}))

    assert adapter_folder(str(folder)).task == "token-classification"


@pytest.mark.parametrize("text", ["mails", "=x", "mails=", "a/b=x", "-x=y"])
def test_value_without_name_and_folder_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="must be NAME=FOLDER"):
        named_adapters([text])


def test_folder_without_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no adapter_config.json; name the folder of an adapter"):
        named_adapters([f"mails={tmp_path}"])


def test_adapter_alone_is_served_without_its_base(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    alone = adapter_folder(str(write_adapter(tmp_path / "my mails")))

    job = _with_serving(_job_of_base(alone, str(base), None), "none", 512, [alone], alone)

    assert (job.model.uri, job.serving is not None and job.serving.serves_model) == (f"file://{base}", False)
    assert job.serving is not None
    assert [(one.name, one.uri) for one in job.serving.adapters] == [("my-mails", f"file://{alone.folder}")]


def test_adapters_beside_a_model_need_names_and_no_optimization(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    two = named_adapters([f"{name}={write_adapter(tmp_path / name)}" for name in ("mails", "reviews")])
    job = TrainerJob.model_validate(
        {"name": "serve", "task": "text-classification", "model": {"uri": f"file://{base}"}}
    )

    served = _with_serving(job, "none", 512, two, None).serving
    assert served is not None
    assert (served.model_name, [one.name for one in served.adapters]) == ("base", ["mails", "reviews"])
    with pytest.raises(UsageError, match="--optimization: must be none for adapters"):
        _with_serving(job, "int8", 512, two, None)
    with pytest.raises(UsageError, match="--adapter: the names must differ; found base, mails, mails"):
        _with_serving(job, "none", 512, [two[0], two[0]], None)
