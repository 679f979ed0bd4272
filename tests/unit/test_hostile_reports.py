"""Reports with numbers that no stage measures, through the operator's reading and decision: none raises."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
from pydantic import ValidationError

from finetune_contract.facts import DeviceFacts, ModelFacts
from finetune_contract.layout import EXIT_CODES, FailureClass
from finetune_contract.measured_devices import MeasuredDevices
from finetune_contract.plan_check import MeasuredTraining
from finetune_contract.report import FailureReport, TrainerReport
from reconcile_world import BERT, MEASURED, SPEC, World, through

HOSTILE = (
    "0", "1", "-1", "1e400", "-1e400", "NaN", str(2**63), "1" + "0" * 400, '"text"', f"[{'1,' * 999}1]", "1e308",
    str(2**53), str(2**48), "true",
)  # fmt: skip
"""Values as they stand in JSON: also those that Python's own writer does not write."""
GPUS = MeasuredDevices(
    device=DeviceFacts(product="Tesla T4", memory_bytes=15 << 30, bf16=False, capability="7.5"), processes=1, per_node=1
)
ON_GPUS = {**SPEC, "resources": {"gpusPerNode": 2, "nodes": 2}}
MIXTURE = {"key_value_heads": 2, "idle_parameters": 1, "experts": 2, "saved_per_token": 1, "saved_per_score": 1}
TRAINED = {
    "steps": 20, "memoryBytes": 1 << 30, "memoryTerms": {"tensors": 1 << 29}, "stepSeconds": 0.5,
    "stepParts": {"optimizer": 0.1, "forward": 0.1},
}  # fmt: skip


def written(stage: str, **fields: Any) -> Any:
    """Return a report as its process writes it."""
    report = TrainerReport(job="reviews", stage=stage, **{"outcome": "succeeded", **fields})  # type: ignore[arg-type]
    return json.loads(report.model_dump_json(by_alias=True, exclude_none=True))


def failed(cause: FailureClass) -> Any:
    """Return the report of a training that failed on GPUs."""
    failure = FailureReport(failure_class=cause, reason="Told", message="Told.", time=5.0)
    return written("train", outcome="failed", failure=failure, devices=GPUS)


PREPARED = written(
    "prepare", measured=MEASURED.model_copy(update={"model": BERT.model_copy(update=MIXTURE)}), seconds=3.0
)
REPORTS: dict[str, tuple[dict[str, Any], int, Any, int]] = {
    # Spec, stages that have succeeded before, report, exit code.
    "prepare on CPUs": (SPEC, 0, PREPARED, 0),
    "prepare on GPUs": (ON_GPUS, 0, PREPARED, 0),
    "train": (SPEC, 1, written("train", metrics={"train": {"measured": TRAINED, "loss": 0.5}}, devices=GPUS), 0),
    "train out of memory": (ON_GPUS, 1, failed(FailureClass.OUT_OF_MEMORY), EXIT_CODES[FailureClass.OUT_OF_MEMORY]),
    "train replanned": (ON_GPUS, 1, failed(FailureClass.REPLANNED), EXIT_CODES[FailureClass.REPLANNED]),
    "evaluate": (SPEC, 2, written("evaluate", metrics={"evaluate": {"accuracy": 0.5, "rows": 3}}), 0),
    "predict": (SPEC, 3, written("predict", metrics={"bad_rows": 3}), 0),
}


def numbers(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Return the path of each number in a document."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in items:
            yield from numbers(part, (*path, key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def with_value(document: Any, path: tuple[str | int, ...], value: str) -> str:
    """Return the document as JSON, with that JSON in one place."""
    changed = deepcopy(document)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = "(here)"
    return json.dumps(changed).replace('"(here)"', value)


def fits_the_api(value: Any) -> bool:
    """Return whether the API server can hold all numbers of a status."""
    if isinstance(value, dict | list):
        return all(fits_the_api(part) for part in (value.values() if isinstance(value, dict) else value))
    return math.isfinite(value) if isinstance(value, float) else not isinstance(value, int) or abs(value) < 2**63


@pytest.mark.parametrize("case", REPORTS.values(), ids=REPORTS.keys())
def test_hostile_numbers_of_a_report_end_in_a_status(case: tuple[dict[str, Any], int, Any, int]):
    spec, before, report, code = case
    world = World(spec=spec, served=("pytorchjob",) if spec is ON_GPUS else ("job",))
    through(world, before)
    child = world.newest()
    world.end_child(child, succeeded=code == 0)
    read = 0
    for number, path in enumerate(numbers(report)):
        # Each field gets a few of the values, each value some of the fields: all are thousands.
        for value in HOSTILE[number % 7 :: 7]:
            attacked = deepcopy(world)
            for pod in attacked.pods_of(child):
                attacked.end_pod(pod, code, with_value(report, path, value))
            if all(pod.ended is None or pod.ended.report is None for pod in attacked.observed().pods):
                continue
            read += 1
            attacked.step()
            attacked.step()
            assert fits_the_api(attacked.status), (path, value)
    assert read


def unbounded(schema: Any, name: str = "") -> Iterator[str]:
    """Return the names of numbers without both bounds in a JSON schema."""
    if isinstance(schema, dict):
        has_most = "maximum" in schema or "exclusiveMaximum" in schema
        has_least = "minimum" in schema or "exclusiveMinimum" in schema
        if schema.get("type") in ("integer", "number") and "const" not in schema and not (has_most and has_least):
            yield name
        for key, part in schema.items():
            yield from unbounded(part, f"{name}.{key}")
    elif isinstance(schema, list):
        for part in schema:
            yield from unbounded(part, name)


@pytest.mark.parametrize("kind", [TrainerReport, MeasuredTraining])
def test_every_number_of_a_report_has_bounds(kind: type[TrainerReport | MeasuredTraining]):
    assert list(unbounded(kind.model_json_schema())) == []


def test_status_tells_which_value_of_a_report_cannot_be_read():
    world = World()
    through(world, 0)
    report = with_value(PREPARED, ("measured", "model", "layers"), "1e400")
    world.end_pod("reviews-prepare-1-0", 0, report)
    world.end_child("reviews-prepare-1", succeeded=True)
    world.settle()
    failure = world.job().status.failure
    assert failure is not None
    assert (failure.failure_class, failure.reason, world.stage("prepare")) == ("NoReport", "NoReport", ("Failed", 1))
    assert " Its report was ignored: measured.model.layers: Input should be a finite number." in failure.message


def test_parts_of_a_model_are_not_larger_than_the_model():
    with pytest.raises(ValidationError, match=r"embedding_parameters \(2\) is more than parameters \(1\)"):
        ModelFacts.model_validate({**BERT.model_dump(), "parameters": 1, "embedding_parameters": 2})


@pytest.mark.parametrize(
    "shape",
    [
        # GPT-3 and Switch-C as published; DeepNet has 1,000 layers; 10 M positions as Llama 4 Scout's.
        {"parameters": 175 * 10**9, "layers": 96, "hidden_size": 12_288, "attention_heads": 96},
        {"parameters": 1571 * 10**9, "parameter_bytes": 4 * 1571 * 10**9, "experts": 2048, "layers": 15},
        {"layers": 2500},
        {"max_positions": 10_485_760},
        {"parameters": 1_000_000_000, "embedding_parameters": 999_999_000, "vocabulary_size": 2_000_000},
    ],
)
def test_unusual_models_are_within_the_bounds(shape: dict[str, int]):
    fields = {**BERT.model_dump(), "parameter_bytes": 4 * shape.get("parameters", 1), **shape}
    assert ModelFacts.model_validate(fields).layers >= 1
