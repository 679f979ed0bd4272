"""An image continues the work of an earlier one that lacks some of its fields: a field at its default, and a field that
is missing from the stored settings, are the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from finetune_contract.choices import Stage
from finetune_contract.layout import JobPaths
from finetune_contract.report import TrainerReport
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.checkpoint.checkpoints import Checkpoint, CheckpointStore, identity, refuse_other_job
from finetune_trainer.core.failures import StageError
from finetune_trainer.scripts.script_inputs import ORIGIN_FILE, Origin, check_origin
from finetune_trainer.stage import runs
from finetune_trainer.tasks.task_registry import task_of

WORLD = {"nodes": 1, "processes_per_node": 2, "device": "cpu", "threads_per_process": 1}
ROWS: dict[str, Any] = {"uri": "file:///rows", "columns": {"text": "text"}}
INFERENCE: dict[str, Any] = {"device": "cpu", "batch_tokens": 64}
ADAPTER = {"method": "lora", "rank": 8, "alpha": 16, "dropout": 0.0}
TRAINING: dict[str, Any] = {
    **{"max_steps": 9, "steps_per_epoch": 3, "learning_rate": 1e-3, "scheduler": "linear", "warmup_steps": 0},
    **{"weight_decay": 0.0, "max_grad_norm": 1.0, "optimizer": "adamw", "seed": 7, "label_smoothing": 0.0},
    "early_stopping": {"patience": 2},
    "adapter": ADAPTER,
    "precision": "fp32",
    "strategy": {"name": "ddp", "pipeline": {"degree": 2, "micro_batches": 1}},
    "batch": {"global_batch_size": 4, "micro_batch_size": 2, "gradient_accumulation": 1, "data_parallel": 2},
    "world": WORLD,
    "checkpoints": {"every_steps": 3, "keep": 2},
}
BODY: dict[str, Any] = {
    "name": "job",
    "run": "uid",
    "task": "preference-tuning",
    "model": {"uri": "file:///m"},
    "dataset": ROWS,
    "device": {
        **{"product": "L4", "memory_bytes": 24 << 30, "bf16": True, "source": "assumed", "needed_bytes": 1 << 30}
    },
    "evaluation": {**INFERENCE, "gate": {"metric": "loss"}},
    "predict": {**INFERENCE, "dataset": ROWS},
    "serving": {
        **{"model_name": "m", "device": "cpu", "max_batch_tokens": 64},
        "adapters": [{"name": "a", "uri": "file:///a"}],
    },
}
TRAINED = TrainerJob.model_validate({**BODY, "training": TRAINING})
SCRIPT = {"url": "https://git.example/a", "ref": "main", "entry_point": "train.py", "world": WORLD}
SCRIPTED = TrainerJob.model_validate({**BODY, "script": SCRIPT})
"""Jobs that name every section, and no field that has a default and is not a section."""
STORED_BY_0_1 = ("strategy", "world", "checkpoints", "batch", "compiles_by_plan")
"""Fields of a training that a checkpoint of version 0.1 leaves out."""


def defaults(value: BaseModel, *place: str) -> Iterator[tuple[str, ...]]:
    """Yield the place of each field of `value`, and of the models in it, that is at its default."""
    for name, field in type(value).model_fields.items():
        inner = getattr(value, name)
        if inner == field.get_default(call_default_factory=True):
            yield (*place, name)
        if isinstance(inner, BaseModel):
            yield from defaults(inner, *place, name)


def models_in(value: BaseModel) -> Iterator[type[BaseModel]]:
    yield type(value)
    for _, inner in value:
        for part in inner if isinstance(inner, tuple) else [inner]:
            if isinstance(part, BaseModel):
                yield from models_in(part)


def models_of(kind: Any) -> Iterator[type[BaseModel]]:
    """Yield the models that an annotation, and the fields of a model, may hold."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
        for field in kind.model_fields.values():
            yield from models_of(field.annotation)
    for part in get_args(kind):
        yield from models_of(part)


def without(stored: dict[str, Any], place: tuple[str, ...]) -> dict[str, Any]:
    """Return a copy without a field, as an image stores it that does not know the field."""
    copied: dict[str, Any] = json.loads(json.dumps(stored))
    within = copied
    for name in place[:-1]:
        within = within[name]
    within.pop(place[-1], None)  # those at their defaults may be missing in any case
    return copied


def test_jobs_of_these_tests_have_every_model_of_the_contract():
    assert {*models_in(TRAINED), *models_in(SCRIPTED)} == {*models_of(TrainerJob)}


# ---------------------------------------------------------------------------------------------------- checkpoints


def stored_by_0_1(job: TrainerJob) -> dict[str, Any]:
    """Return the settings in a checkpoint of version 0.1: whole models, defaults included."""
    assert job.training is not None
    return {
        "task": job.task,
        "model": job.model.model_dump(mode="json"),
        "data": "rows",
        **job.training.model_dump(mode="json", exclude=set(STORED_BY_0_1)),
        "global_batch_size": job.training.batch.global_batch_size,
        "preference": job.preference.model_dump(mode="json"),
    }


def checkpoint_of(folder: Path, settings: dict[str, Any]) -> Checkpoint:
    store = CheckpointStore(folder, keep=1)
    store.begin(1)
    return store.commit(1, strategy="ddp", world_size=2, job=settings, first_of_run=True)


def identity_of(job: TrainerJob) -> dict[str, Any]:
    return identity(job, "rows", task_of(job).head.identity(job))


def test_identity_has_no_field_at_its_default():
    found = identity_of(TRAINED)
    assert found == {
        **{"task": "preference-tuning", "model": {"uri": "file:///m"}, "data": "rows", "global_batch_size": 4},
        **{"max_steps": 9, "steps_per_epoch": 3, "learning_rate": 1e-3, "scheduler": "linear", "warmup_steps": 0},
        **{"weight_decay": 0.0, "max_grad_norm": 1.0, "optimizer": "adamw", "seed": 7, "label_smoothing": 0.0},
        **{"early_stopping": {"patience": 2}, "adapter": ADAPTER, "precision": "fp32"},
    }


def test_checkpoint_without_a_field_that_has_a_default_is_resumed(tmp_path: Path):
    stored, ours = stored_by_0_1(TRAINED), identity_of(TRAINED)
    places = [("preference",), *defaults(TRAINED.preference, "preference"), *defaults(TRAINED.model, "model")]
    assert TRAINED.training is not None
    places += defaults(TRAINED.training)
    for at, place in enumerate([("nothing",), *places]):
        if place[0] not in STORED_BY_0_1:
            refuse_other_job(checkpoint_of(tmp_path / str(at), without(stored, place)), ours)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"preference": {"beta": 0.2}}, "preference was not set, is {'beta': 0.2}"),
        ({"training": {**TRAINING, "adapter": None}}, "is not set."),
        ({"training": {**TRAINING, "learning_rate": 1.0}}, "learning_rate was 0.001, is 1.0."),
        ({"training": {**TRAINING, "early_stopping": {"patience": 2, "metric": "rewards/margins"}}}, "'metric': "),
    ],
)
def test_checkpoint_of_a_training_with_another_value_is_refused(change: Any, sentence: str, tmp_path: Path):
    checkpoint = checkpoint_of(tmp_path, stored_by_0_1(TRAINED))
    other = TrainerJob.model_validate({**BODY, "training": TRAINING, **change})
    with pytest.raises(StageError) as refused:
        refuse_other_job(checkpoint, identity_of(other))
    assert sentence in refused.value.message


# -------------------------------------------------------------------------------------- programs and finished stages


def test_program_continues_from_checkpoints_of_an_image_with_fewer_fields(tmp_path: Path):
    paths, dataset = JobPaths.of(tmp_path, "job"), SCRIPTED.dataset
    (paths.checkpoints / "checkpoint-3").mkdir(parents=True)
    (paths.checkpoints / "checkpoint-3" / "trainer_state.json").write_text("{}")
    assert dataset is not None
    kept = {
        **{"url": "https://git.example/a", "commit": "c", "path": None, "entryPoint": "train.py", "arguments": []},
        **{"model": "file:///m", "revision": "main"},
    }
    ours = Origin.model_validate({**kept, "data": dataset})
    stored = json.loads(dataset.to_json())
    for place in [("nothing",), *((name,) for name in stored if name != "uri")]:
        text = json.dumps(without(stored, place))
        (paths.checkpoints / ORIGIN_FILE).write_text(json.dumps({**kept, "data": text}))
        if place != ("columns",):
            check_origin(paths, ours)
            continue
        with pytest.raises(StageError, match="written with other settings: data was"):
            check_origin(paths, ours)


@pytest.mark.parametrize("job", [TRAINED, SCRIPTED], ids=["trained", "script"])
def test_finished_stage_is_not_repeated_by_an_image_with_more_fields(job: TrainerJob, tmp_path: Path):
    paths, given = JobPaths.of(tmp_path, "job"), runs.RecordedSettings.of(job, None)
    report = TrainerReport(job="job", stage=Stage.TRAIN, outcome="succeeded")
    runs.mark_complete(paths, Stage.TRAIN, given, report)
    record = paths.state / "train.given.json"
    stored = {"job": job.model_dump(mode="json"), "deepspeed": None}
    places = [("job", *place) for place in defaults(job)]
    assert len(places) > 40
    for place in places:
        record.write_text(json.dumps(without(stored, place)))
        assert runs.finished(paths, Stage.TRAIN, given) == report, place
    record.write_text(json.dumps(without(stored, ("job", "model"))))
    assert runs.finished(paths, Stage.TRAIN, given) is None
