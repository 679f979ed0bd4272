"""Recorded outputs of whole jobs: plans, DeepSpeed's configuration, and all objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from finetune_operator.cli.terminal.yaml_text import documents as yaml_text
from golden_cases import FOLDER, JOBS, golden_manifests
from golden_records import (
    job_file,
    job_text,
    numbers_text,
    object_record,
    parsed,
    plan_files,
    plan_record,
    sentences_text,
    sources,
    whole_file,
    whole_names,
    whole_text,
)

WHOLE = whole_names()
TABLES = {"numbers.txt": numbers_text, "sentences.txt": sentences_text}


@pytest.mark.parametrize(("job", "name"), WHOLE)
def test_whole_document_is_the_one_on_record(job: str, name: str, golden: Callable[[str, str], None]) -> None:
    golden(whole_file(job, name), whole_text(job, name))


@pytest.mark.parametrize("job", JOBS)
def test_differences_of_a_job_are_those_on_record(job: str, golden: Callable[[str, str], None]) -> None:
    golden(job_file(job), job_text(job))


@pytest.mark.parametrize("file", TABLES)
def test_numbers_and_sentences_are_those_on_record(file: str, golden: Callable[[str, str], None]) -> None:
    golden(file, TABLES[file]())


@pytest.mark.parametrize("job", ["eight-gpus-priced", "examples/cpu-only", "served-by-kserve", "by-spark"])
def test_no_value_of_a_job_is_without_a_record(job: str) -> None:
    plan, deepspeed = plan_files(job)
    lost = [path for path, changed in _changes(plan) if plan_record(changed) == plan_record(plan)]
    origin = sources(plan, deepspeed)
    for manifests in golden_manifests(job).values():
        for each in parsed(manifests):
            known = object_record(each, origin)
            lost += [path for path, changed in _changes(each) if object_record(changed, origin) == known]
    assert not lost


def _changes(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the node with another value in the place of each of its texts and numbers, and the value's path."""
    match node:
        case dict() | list():
            for key, value in node.items() if isinstance(node, dict) else enumerate(node):
                for inner, changed in _changes(value, f"{path}.{key}"):
                    whole = node.copy()
                    whole[key] = changed
                    yield inner, whole
        case bool():
            yield path, not node
        case str():
            yield path, f"1{node}"
        case int() | float():
            yield path, node + node // 2 + 2**20


@pytest.mark.parametrize("job", ["hostile-text", "gpu-gang-with-everything", "served"])
def test_yaml_of_the_objects_is_read_as_the_objects(job: str) -> None:
    manifests = [each for every in golden_manifests(job).values() for each in every]
    assert list(yaml.load_all(yaml_text(manifests), Loader=yaml.CSafeLoader)) == manifests


def test_there_are_records_of_all_jobs_and_no_others(request: pytest.FixtureRequest) -> None:
    assert len(JOBS) >= 45
    wanted = {whole_file(*each) for each in WHOLE} | {job_file(job) for job in JOBS}
    folders = (FOLDER / "whole", FOLDER / "differences")
    found = {file for folder in folders for file in folder.rglob("*") if file.is_file()}
    unused = {file for file in found if str(file.relative_to(FOLDER)) not in wanted}
    if request.config.getoption("--update-golden"):
        for file in unused:
            file.unlink()
        return
    assert not unused
    assert len(found) == len(wanted)
