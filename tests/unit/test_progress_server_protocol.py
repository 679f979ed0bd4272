"""Contents of the path and the body of a progress report."""

from __future__ import annotations

import importlib.util
import json
import re
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_contract.choices import Stage
from finetune_contract.facts import DeviceFacts
from finetune_contract.measured_devices import MeasuredDevices
from finetune_contract.report import Communication
from finetune_operator.controller.servers.progress_protocol import (
    AttemptKey,
    BadBodyError,
    attempt_of,
    findings_of,
    mark_of,
    merged_progress,
    progress_of,
    update_of,
)
from finetune_operator.jobs.launchers.launcher_registry import stage
from finetune_operator.jobs.render.render_types import Attempt, Owner, ProgressEndpoint, RenderContext
from finetune_operator.jobs.state.decision_types import NO_FINDINGS, Findings
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Facts
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS
from finetune_operator.spec.types import FineTuneJob, ProgressStatus

NOW = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
TIME = "2026-01-02T03:04:05Z"
ROOT = "/v1alpha1/namespaces/"

PATHS: dict[str, tuple[str, AttemptKey | None]] = {
    "an attempt": (
        "team/finetunejobs/tune/stages/train/attempts/12",
        AttemptKey("team", "tune", Stage.TRAIN, 12),
    ),
    "a job with dots, as names may have": (
        "team/finetunejobs/a.b-1/stages/prepare/attempts/1",
        AttemptKey("team", "a.b-1", Stage.PREPARE, 1),
    ),
    "a name of one digit": ("t/finetunejobs/7/stages/predict/attempts/1", AttemptKey("t", "7", Stage.PREDICT, 1)),
    "an upper-case name": ("Team/finetunejobs/tune/stages/train/attempts/1", None),
    "a name that ends in a hyphen": ("team/finetunejobs/tune-/stages/train/attempts/1", None),
    "no name": ("team/finetunejobs//stages/train/attempts/1", None),
    "a way up": ("team/finetunejobs/../stages/train/attempts/1", None),
    "a leading zero": ("team/finetunejobs/tune/stages/train/attempts/01", None),
    "six digits": ("team/finetunejobs/tune/stages/train/attempts/100000", None),
    "another kind of digit": ("team/finetunejobs/tune/stages/train/attempts/\u0661", None),
    "a slash at the end": ("team/finetunejobs/tune/stages/train/attempts/1/", None),
    "a line break at the end": ("team/finetunejobs/tune/stages/train/attempts/1\n", None),
}


@pytest.mark.parametrize("case", PATHS)
def test_a_path_means_one_attempt_or_none(case: str) -> None:
    path, expected = PATHS[case]
    assert attempt_of(ROOT + path) == expected


def test_every_address_that_pods_are_given_means_their_attempt() -> None:
    text = {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": "9.tune"},
        "spec": {
            "task": "text-classification",
            "model": {"uri": "hf://a/b"},
            "dataset": {"uri": "hf://c/d"},
            "training": {},
            "predict": {},
        },
    }
    job = FineTuneJob.model_validate_json(json.dumps(text))
    context = RenderContext(
        "team", job.spec, CLUSTER_SETTINGS, Owner("9.tune", "uid"), ProgressEndpoint("https://p:1", "CA")
    )
    made = plan(job, Facts(served=("job",)), CLUSTER_SETTINGS)
    found = {
        attempt_of(url)
        for each in made.stages
        for manifest in stage(made, context, Attempt(each, 12))
        for url in re.findall(r"https://p:1(/[^\"\s]*)", json.dumps(manifest))
    }
    assert found == {AttemptKey("team", "9.tune", each, 12) for each in made.stages}
    assert Stage.TRAIN in made.stages


def body(metrics: dict[str, Any], **fields: Any) -> bytes:
    listed = [{"name": name, "value": str(value)} for name, value in metrics.items()]
    return json.dumps({"trainerStatus": {"metrics": listed, "lastUpdatedTime": "then", **fields}}).encode()


BODIES: dict[str, tuple[bytes, ProgressStatus]] = {
    "our trainer's": (
        body(
            {
                "epoch": 1.5, "loss": 0.25, "samples_per_second": 10.5, "tokens_per_second": 99, "step": 3,
                "total_steps": 8, "eval_accuracy": 0.5,
            },
            progressPercentage=37,
            estimatedRemainingSeconds=60,
        ),
        ProgressStatus(
            step=3, total_steps=8, epoch=1.5, percent=37, loss=0.25, samples_per_second=10.5, tokens_per_second=99.0,
            remaining_seconds=60.0, last_update_time=TIME,
        ),
    ),
    "rows a second over all pods that predict, before those of one process": (
        body({"step": 30, "total_steps": 90, "samples_per_second": 2.5, "rows_per_second": 7.5}),
        ProgressStatus(step=30, total_steps=90, percent=33, samples_per_second=7.5, last_update_time=TIME),
    ),
    "executors that Spark has replaced": (
        body({"step": 30, "total_steps": 90, "replaced_pods": 2.0}),
        ProgressStatus(step=30, total_steps=90, percent=33, replaced_pods=2, last_update_time=TIME),
    ),
    "transformers' callback at a step": (
        body(
            {"loss": 0.5, "grad_norm": 1.0, "learning_rate": 2e-5, "current_step": 5, "total_steps": 9,
             "current_epoch": 0.55},
            progressPercentage=55, estimatedRemainingSeconds=7,
        ),
        ProgressStatus(
            step=5, total_steps=9, epoch=0.55, percent=55, loss=0.5, remaining_seconds=7.0, last_update_time=TIME
        ),
    ),
    "transformers' callback at the end": (
        body(
            {"train_loss": 0.75, "train_samples_per_second": 4.5, "train_runtime": 8.0, "epoch": 2.0},
            progressPercentage=100, estimatedRemainingSeconds=0,
        ),
        ProgressStatus(
            epoch=2.0, percent=100, loss=0.75, samples_per_second=4.5, remaining_seconds=0.0, last_update_time=TIME
        ),
    ),
    "the loss of the step before that of the whole training": (
        body({"train_loss": 1, "loss": 2}), ProgressStatus(loss=2.0, last_update_time=TIME)
    ),
    "no percentage but steps": (
        body({"step": 1, "total_steps": 3}),
        ProgressStatus(step=1, total_steps=3, percent=33, last_update_time=TIME),
    ),
    "more steps than there are": (
        body({"step": 9, "total_steps": 3}),
        ProgressStatus(step=9, total_steps=3, percent=100, last_update_time=TIME),
    ),
    "no steps at all": (
        body({"total_steps": 0, "step": 0}),
        ProgressStatus(step=0, total_steps=0, last_update_time=TIME),
    ),
    "numbers that are none": (
        body({"loss": "nan", "epoch": "inf", "step": "four", "tokens_per_second": "-1", "samples_per_second": ""}),
        ProgressStatus(last_update_time=TIME),
    ),
    "a bad name beside a good one": (
        body({"loss": "nan", "train_loss": 0.5}), ProgressStatus(loss=0.5, last_update_time=TIME)
    ),
    "a step beyond what JSON can hold": (body({"step": 2**60}), ProgressStatus(last_update_time=TIME)),
    "a number of a million digits": (body({"loss": "9" * 60_000}), ProgressStatus(last_update_time=TIME)),
    "fields of a later version": (
        body({"loss": 1}, novelty={"a": 1}), ProgressStatus(loss=1.0, last_update_time=TIME)
    ),
    "nothing but a time": (b'{"trainerStatus": {"lastUpdatedTime": ""}}', ProgressStatus(last_update_time=TIME)),
}  # fmt: skip


@pytest.mark.parametrize("case", BODIES)
def test_body_is_read_as_progress_of_the_stage(case: str) -> None:
    given_body, expected = BODIES[case]
    assert progress_of(update_of(given_body), NOW) == expected


def test_an_error_names_the_fields_and_repeats_no_value() -> None:
    bad = {"progressPercentage": "canary", "metrics": [{"name": 7, "value": ["canary"]}], "canary": "canary"}
    with pytest.raises(BadBodyError) as caught:
        update_of(json.dumps({"trainerStatus": bad}).encode())
    assert str(caught.value) == (
        "the body is not a progress update: "
        "trainerStatus.progressPercentage: Input should be a valid integer, unable to parse string as an integer; "
        "trainerStatus.metrics.0.name: Input should be a valid string; "
        "trainerStatus.metrics.0.value: Input should be a valid string; "
        "trainerStatus.lastUpdatedTime: Field required"
    )


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_bytes_that_are_no_update_are_a_bad_body(text: bytes) -> None:
    with pytest.raises(BadBodyError, match=r"^the body is not a progress update: "):
        update_of(text)


def test_fields_missing_in_the_last_report_keep_their_values() -> None:
    before = ProgressStatus(step=8, total_steps=9, percent=88, loss=0.5, last_update_time="2026-01-02T03:04:00Z")
    now = ProgressStatus(percent=100, loss=0.25, last_update_time=TIME)
    assert merged_progress(before, now) == ProgressStatus(
        step=8, total_steps=9, percent=100, loss=0.25, last_update_time=TIME
    )
    assert merged_progress(None, now) == now


@pytest.mark.skipif(importlib.util.find_spec("finetune_trainer") is None, reason="the trainer is not installed")
def test_update_of_the_trainer_is_read_without_loss() -> None:
    from finetune_contract.report import Progress
    from finetune_trainer.core.progress import kubeflow_update

    progress = Progress(
        stage=Stage.TRAIN, step=4, total_steps=10, epoch=0.4, loss=1.25, samples_per_second=2.5,
        tokens_per_second=320.0, remaining_seconds=30.0, metrics={"eval_accuracy": 0.5}, time=1.0,
    )  # fmt: skip
    assert progress_of(update_of(kubeflow_update(progress).to_json().encode()), NOW) == ProgressStatus(
        step=4, total_steps=10, epoch=0.4, percent=40, loss=1.25, samples_per_second=2.5, tokens_per_second=320.0,
        remaining_seconds=30.0, last_update_time=TIME,
    )  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("finetune_trainer") is None, reason="the trainer is not installed")
def test_measurements_of_the_trainer_are_read_from_its_updates() -> None:
    from finetune_contract.report import Progress
    from finetune_trainer.core.progress import Findings as Measured
    from finetune_trainer.core.progress import ProgressReporter, kubeflow_update

    class Outlet:
        interval_seconds = 0.0

        def __init__(self) -> None:
            self.sent: list[Progress] = []

        def publish(self, progress: Progress) -> None:
            self.sent.append(progress)

        def close(self) -> None: ...

    outlet, measured = Outlet(), Measured()
    reporter = ProgressReporter(Stage.TRAIN, [outlet], findings=measured)
    reporter.update(1, 9)
    device = DeviceFacts(product="NVIDIA L40S", memory_bytes=48 << 30, capability="8.9")
    measured.devices = MeasuredDevices(device=device, processes=8, per_node=8, nvlink=False)
    measured.communication = Communication(inside="p2p", between="efa", gpudirect=True)
    measured.add_note("mlflow does not answer.")
    measured.add_note("wandb does not either.")
    reporter.update(2, 9)
    first, second = (findings_of(update_of(kubeflow_update(each).to_json().encode())) for each in outlet.sent)
    assert first == NO_FINDINGS
    assert second == Findings(
        measured.devices, measured.communication, "mlflow does not answer. wandb does not either."
    )


@pytest.mark.parametrize(
    "text", ["", "8 GPUs", "[]", '{"device": 1, "inside": "tube"}', json.dumps({"inside": "p2p" + 3000 * " "})]
)
def test_measurements_that_cannot_be_read_are_left_out(text: str) -> None:
    body = {"trainerStatus": {"metrics": [{"name": "step", "value": "3"}], "lastUpdatedTime": TIME}}
    body["trainerStatus"]["metrics"] += [{"name": name, "value": text} for name in ("devices", "communication")]  # type: ignore[operator]
    update = update_of(json.dumps(body).encode())
    assert findings_of(update) == NO_FINDINGS
    assert progress_of(update, NOW).step == 3


# ------------------------------------------------------------------------------------------------------------ movement

MOVED: dict[str, tuple[dict[str, Any], bool]] = {
    "the same again": ({}, False),
    "later, with another remaining time": (
        {"lastUpdatedTime": "2026-01-01T13:00:00Z", "estimatedRemainingSeconds": 9}, False,
    ),
    "rows a second that sink with the clock": ({"metrics": {"rows_per_second": "1"}}, False),
    "a rate that sinks with the clock": ({"metrics": {"train_samples_per_second": "1"}}, False),
    "figures in another order": ({"metrics": {"loss": "0.5", "current_step": "7"}}, False),
    "another step": ({"metrics": {"current_step": "8"}}, True),
    "another loss": ({"metrics": {"loss": "0.4"}}, True),
    "the percentage of a program that names no step": ({"progressPercentage": 36}, True),
    "a figure that we do not know": ({"metrics": {"validation_batches": "12"}}, True),
}  # fmt: skip


@pytest.mark.parametrize("case", MOVED)
def test_movement_is_anything_but_time(case: str) -> None:
    changes, expected = MOVED[case]
    first = {"lastUpdatedTime": "2026-01-01T12:00:00Z", "progressPercentage": 35, "estimatedRemainingSeconds": 90}
    figures = {"current_step": "7", "loss": "0.5", "train_samples_per_second": "3"}

    def mark(update: dict[str, Any], metrics: dict[str, str]) -> str:
        listed = [{"name": name, "value": value} for name, value in metrics.items()]
        return mark_of(update_of(json.dumps({"trainerStatus": {**update, "metrics": listed}}).encode()))

    more = changes.get("metrics", {})
    after = mark({**first, **changes}, {**more, **{name: value for name, value in figures.items() if name not in more}})
    assert (after != mark(first, figures)) == expected
