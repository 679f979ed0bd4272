"""Jobs of `manifests/examples`, for the suites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune_operator.documents import read_documents
from finetune_operator.spec.checks.validation import validate_job
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, LOCAL_SETTINGS
from finetune_operator.spec.types import FineTuneJob

FOLDER = Path(__file__).parents[1] / "manifests" / "examples"
EXAMPLES = tuple(sorted(file.stem for file in FOLDER.glob("*.yaml")))
LOCAL = ("quickstart",)
"""Examples that run on one machine: pods cannot read their package and their folder."""
FITTED_LOCALLY = (
    "chat-lora",
    "chat-qlora",
    "domain-words",
    "gpt2-175b",
    "gpt2-30b",
    "gpt2-30b-sharded",
    "long-texts",
    "mnli-pipeline",
    "preferences",
    "squad-data-parallel",
    "summaries",
)
"""Examples that the suites run on one machine, with models for their tasks or of their families; all others run in a
cluster.
"""
IN_CLUSTER = tuple(name for name in EXAMPLES if name not in LOCAL)


def example_document(name: str) -> dict[str, Any]:
    """Return the only document of the file, read as by kubectl."""
    documents, problems = read_documents((FOLDER / f"{name}.yaml").read_bytes())
    assert not problems, problems
    (document,) = documents
    assert isinstance(document.value, dict)
    return document.value


def example_job(name: str) -> FineTuneJob:
    job, problems = validate_job(example_document(name), LOCAL_SETTINGS if name in LOCAL else CLUSTER_SETTINGS)
    assert job is not None, problems
    return job
