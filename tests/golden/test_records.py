"""Recorded outputs of whole jobs: plans, DeepSpeed's configuration, and all objects."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import yaml

from differences import same
from finetune_operator.cli.yaml_text import documents as yaml_text
from golden_cases import FOLDER, JOBS, golden_manifests
from golden_records import (
    ORDER,
    bases,
    documents,
    expanded,
    job_file,
    job_text,
    parsed,
    rebuilt,
    whole_file,
    whole_names,
    whole_text,
)

WHOLE = whole_names()


@pytest.mark.parametrize(("job", "name"), WHOLE)
def test_whole_document_is_the_one_on_record(job: str, name: str, golden: Callable[[str, str], None]) -> None:
    golden(whole_file(job, name), whole_text(job, name))


@pytest.mark.parametrize("job", JOBS)
def test_differences_of_a_job_are_those_on_record(job: str, golden: Callable[[str, str], None]) -> None:
    file = FOLDER / job_file(job)
    text = job_text(job, file.read_text(encoding="utf-8") if file.is_file() else "")
    golden(job_file(job), text)
    assert same(rebuilt(text), documents(job))


@pytest.mark.parametrize("job", JOBS)
def test_objects_are_rebuilt_from_the_record(job: str) -> None:
    found = rebuilt((FOLDER / job_file(job)).read_text(encoding="utf-8"))
    objects = {
        launcher: expanded([found[name] for name in names], found) for launcher, names in found.get(ORDER, {}).items()
    }
    assert same(objects, {launcher: parsed(manifests) for launcher, manifests in golden_manifests(job).items()})


@pytest.mark.parametrize("job", JOBS)
def test_yaml_of_the_objects_is_read_as_the_objects(job: str) -> None:
    manifests = {json.dumps(each): each for every in golden_manifests(job).values() for each in every}
    read = yaml.load_all(yaml_text(list(manifests.values())), Loader=yaml.CSafeLoader)
    assert list(read) == list(manifests.values())


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


def test_every_document_has_a_base_that_is_whole() -> None:
    names = {name.partition("@")[0] for job in JOBS for name in documents(job)}
    assert {name for name in names for job in bases(name) if (job, name) not in WHOLE} == set()
