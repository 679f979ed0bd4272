"""Settings copied from other tools: mapped to fields, ignored with a note, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from finetune_contract.arguments import FREE, OWNED_BY_PLAN, known_arguments
from finetune_operator.cli.main import app
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Facts
from finetune_operator.spec.checks.copied_settings import ARGUMENTS, COPIED, SAME, settle
from finetune_operator.spec.checks.notices import HIGH_RATES, notices
from finetune_operator.spec.checks.validation import validate_job
from finetune_operator.spec.fields.shapes import find, spec_shape
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, LOCAL_SETTINGS
from finetune_operator.spec.types import FineTuneJob
from mending import job_document


def accepted(**spec: Any) -> FineTuneJob:
    job, problems = validate_job(job_document(spec), LOCAL_SETTINGS)
    assert job is not None, problems
    return job


def refused(**spec: Any) -> list[str]:
    return [problem.path for problem in validate_job(job_document(spec), LOCAL_SETTINGS)[1]]


def with_arguments(**arguments: Any) -> dict[str, Any]:
    return {"training": {"arguments": arguments}}


def with_deepspeed(config: dict[str, Any], **parallelism: Any) -> dict[str, Any]:
    return {"parallelism": {"strategy": "deepspeed", "deepspeedConfig": config, **parallelism}}


MAPPED: dict[str, tuple[dict[str, Any], str, Any]] = {
    "checkpoints that are kept": (with_arguments(save_total_limit=2), "checkpoints.keep", 2),
    "steps between checkpoints": (with_arguments(save_steps=500), "checkpoints.every.steps", 500),
    "an optimizer's name": (with_arguments(optim="adamw_torch"), "training.optimizer", "adamw"),
    "another optimizer": (with_arguments(optim="adafactor"), "training.optimizer", "adafactor"),
    "a ZeRO stage": (with_deepspeed({"zero_optimization": {"stage": 2}}), "parallelism.zeroStage", 2),
}


@pytest.mark.parametrize("case", MAPPED)
def test_setting_with_the_meaning_of_a_field_is_mapped_to_it(case: str) -> None:
    spec, field, value = MAPPED[case]
    job = accepted(**spec)
    found: Any = settle(job.spec).spec.model_dump(mode="json", by_alias=True)
    for part in field.split("."):
        found = found[part]
    assert found == value
    (notice,) = notices(job.spec)
    assert f"is mapped to spec.{field.removesuffix('.steps')}" in notice


IGNORED = {
    "logging": with_arguments(logging_steps=10, logging_strategy="steps", disable_tqdm=False, log_level="info"),
    "folders": with_arguments(overwrite_output_dir=True, save_safetensors=True),
    "stages": with_arguments(do_train=True, do_eval=True),
    "validation": with_arguments(eval_strategy="epoch"),
    "validation by its earlier name": with_arguments(evaluation_strategy="epoch"),
    "nothing": with_arguments(push_to_hub=False, max_steps=-1, deepspeed=None, fsdp=""),
    "the same as the field": {"training": {"learningRate": 1e-4, "arguments": {"learning_rate": 1e-4}}},
    "steps per print": with_deepspeed({"steps_per_print": 10}),
    "auto": with_deepspeed(
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "fp16": {"enabled": "auto", "loss_scale": 0},
            "bf16": {"enabled": "auto"},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
            "zero_optimization": {"reduce_bucket_size": "auto", "overlap_comm": True},
        }
    ),
    "the same key as the field": with_deepspeed({"zero_optimization": {"stage": 3}}, zeroStage=3),
}


@pytest.mark.parametrize("case", IGNORED)
def test_setting_without_effect_is_ignored_with_a_note(case: str) -> None:
    job = accepted(**IGNORED[case])
    settled = settle(job.spec)
    assert settled.notes
    assert all("is ignored: " in note for note in settled.notes)
    training = settled.spec.training
    assert training is not None
    assert training.arguments == {}
    left = settled.spec.parallelism.deepspeed_config
    assert left in ({}, {"fp16": {"loss_scale": 0}, "zero_optimization": {"overlap_comm": True}})


REFUSED = {
    "another rate": (with_arguments(learning_rate=1e-4), "training.arguments.learning_rate"),
    "no training": (with_arguments(do_train=False), "training.arguments.do_train"),
    "an upload": (with_arguments(push_to_hub=True), "training.arguments.push_to_hub"),
    "an optimizer that is not there": (with_arguments(optim="lion_32bit"), "training.arguments.optim"),
    "two optimizers": (
        {"training": {"optimizer": "sgd", "arguments": {"optim": "adamw_torch"}}},
        "training.arguments.optim",
    ),
    "two numbers": (
        {"checkpoints": {"keep": 5}, **with_arguments(save_total_limit=2)},
        "training.arguments.save_total_limit",
    ),
    "no number": (with_arguments(save_total_limit="two"), "training.arguments.save_total_limit"),
    "too few": (with_arguments(save_total_limit=0), "training.arguments.save_total_limit"),
    "two stages": (
        with_deepspeed({"zero_optimization": {"stage": 3}}, zeroStage=2),
        "parallelism.deepspeedConfig.zero_optimization.stage",
    ),
    "another optimizer of DeepSpeed": (
        with_deepspeed({"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}),
        "parallelism.deepspeedConfig.optimizer",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_setting_that_contradicts_a_field_is_refused(case: str) -> None:
    spec, path = REFUSED[case]
    assert refused(**spec) == [f"spec.{path}"]


def test_a_field_that_a_setting_is_taken_as_keeps_the_rules() -> None:
    spec = {**with_arguments(optim="adafactor"), "parallelism": {"strategy": "fsdp"}}
    assert refused(**spec) == ["spec.training.optimizer"]


def test_copied_settings_map_to_fields_and_are_not_free_arguments() -> None:
    for row in COPIED:
        assert row.field is None or find(spec_shape(), row.field.split(".")) is not None
        assert row.becomes or row.field
        assert not FREE.intersection(row.names)
    for name, field in SAME.items():
        assert find(spec_shape(), field.split(".")) is not None
        assert OWNED_BY_PLAN.get(name, field) == field


def test_every_argument_of_transformers_is_free_mapped_or_gets_a_hint() -> None:
    copied = {name for row in COPIED if row.block == ARGUMENTS for name in row.names}
    for name in known_arguments():
        if name in FREE or name in copied:
            continue
        (problem,) = validate_job(job_document(with_arguments(**{name: {"odd": 1}})), LOCAL_SETTINGS)[1]
        assert problem.path == f"spec.training.arguments.{name}"
        expected = ("set spec.", "set metadata.", "leave it out", "move it below spec, as predict")
        assert problem.hint.startswith(expected), (name, problem.hint)


def test_trainer_gets_mapped_fields_and_no_ignored_settings() -> None:
    spec = {
        "training": {"arguments": {"logging_steps": 5, "save_total_limit": 2, "adam_beta1": 0.8}},
        **with_deepspeed({"steps_per_print": 5, "zero_optimization": {"stage": 1, "overlap_comm": True}}),
    }
    made = plan(accepted(**spec), Facts(), CLUSTER_SETTINGS)
    training = made.trainer.training
    assert training is not None
    assert training.arguments == {"adam_beta1": 0.8}
    assert training.checkpoints.keep == 2
    assert made.strategy == "deepspeed-zero1"
    assert made.deepspeed_overrides == {"zero_optimization": {"overlap_comm": True}}
    assert len([reason for reason in made.reasons if " is ignored: " in reason or " is mapped to " in reason]) == 4


@pytest.mark.parametrize("command", [("validate",), ("plan", "--no-measure"), ("run", "--dry-run", "--no-measure")])
def test_every_command_reports_the_effect_of_a_copied_setting(command: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    (tmp_path / "rows.jsonl").write_text('{"text": "a", "label": 0}\n')
    spec = {
        "dataset": {"uri": "file://rows.jsonl"},
        "training": {"arguments": {"logging_steps": 10}, "learningRate": 2},
    }
    file.write_text(yaml.safe_dump(job_document(spec)))
    result = CliRunner().invoke(app, [*command, str(file)])
    assert "spec.training.arguments.logging_steps: 10 is ignored: every step is reported" in result.output
    assert "spec.training.learningRate: 2 is very high for adamw" in result.output


def test_validate_as_data_holds_the_notes(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_document(with_arguments(save_total_limit=2))))
    result = CliRunner().invoke(app, ["validate", str(file), "-o", "json"])
    (note,) = json.loads(result.stdout)["notes"]
    assert note.endswith("spec.training.arguments.save_total_limit: 2 is mapped to spec.checkpoints.keep.")


@pytest.mark.parametrize("optimizer", HIGH_RATES)
def test_very_high_learning_rate_gets_a_notice(optimizer: str) -> None:
    most = HIGH_RATES[optimizer]  # type: ignore[index]
    for rate, expected in ((most, 0), (most * 2, 1)):
        spec = {"training": {"learningRate": rate, "optimizer": optimizer}}
        assert len(notices(accepted(**spec).spec)) == expected


def test_number_of_notices_is_limited() -> None:
    many = {f"key_{number}": "auto" for number in range(500)}
    found = notices(accepted(**with_deepspeed({"autotuning": many})).spec)
    assert len(found) == 21
    assert found[-1] == "480 more settings are ignored or mapped to fields"


def test_bare_kubernetes_job_is_one_problem(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    kinds = (("batch/v1", "Job"), ("kubeflow.org/v1", "PyTorchJob"), ("trainer.kubeflow.org/v1alpha1", "TrainJob"))
    for version, kind in kinds:
        file.write_text(yaml.safe_dump({"apiVersion": version, "kind": kind, "metadata": {"name": "a"}, "spec": {}}))
        result = CliRunner().invoke(app, ["validate", str(file)])
        assert result.exit_code == 1
        (line,) = [line for line in result.output.splitlines() if line.strip()]
        assert f'kind: value "{kind}": runs containers, and there is no FineTuneJob' in line
        assert "spec.resources.gpusPerNode" in line


def test_kubernetes_job_next_to_a_job_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    other = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "fill"}, "spec": {}}
    file.write_text(yaml.safe_dump_all([other, job_document({})]))
    result = CliRunner().invoke(app, ["validate", str(file)])
    assert result.exit_code == 0
    assert "is ignored" in result.output
