"""Generated specs that `finetune validate` accepts are accepted by a real API server, and so are their objects."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given

from cluster_support.control_plane import Cluster
from cluster_support.world import fresh_namespace
from finetune_operator.jobs.launchers.launcher_registry import render
from finetune_operator.jobs.render.render_types import RenderContext
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Facts, PlanRefused
from finetune_operator.spec.checks.validation import validate_job
from finetune_operator.spec.launcher_rows import TRAINING
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS
from finetune_operator.spec.types import FineTuneJob
from generated_specs import specs
from suite_plugins.fuzz import examples, scaled

EXAMPLES = 600
RENDERED = 60
"""Number of jobs whose objects are tried too, of each launcher in turn."""
BATCH = 500
"""Documents of one request."""


@functools.cache
def accepted() -> list[tuple[dict[str, Any], FineTuneJob]]:
    """Return generated documents in which `finetune validate` finds no problem."""
    found: list[tuple[dict[str, Any], FineTuneJob]] = []

    @examples(EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(specs())
    def collect(spec: dict[str, Any]) -> None:
        frame = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": {"name": f"g{len(found)}"}}
        job, problems = validate_job({**frame, "spec": spec}, CLUSTER_SETTINGS)
        if job is not None and not problems:
            found.append(({**frame, "spec": spec}, job))

    collect()
    return found


def refused(cluster: Cluster, namespace: str, documents: list[dict[str, Any]]) -> list[str]:
    """Return the API server's errors; none if it would accept all documents."""
    # As one JSON value: kubectl's YAML reads more words as numbers than the library that would write it.
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": documents})
    arguments = ("create", "--dry-run=server", "--validate=strict", "-n", namespace, "-f", "-")
    ran = cluster.kubectl(*arguments, stdin=text, seconds=300)
    created = len(re.findall(r" created \(server dry run\)$", ran.stdout, re.MULTILINE))
    errors = [line for line in ran.stderr.splitlines() if line.strip()]
    return errors if created == len(documents) else [*errors, f"{created} of {len(documents)} were taken"]


@pytest.mark.hypothesis
def test_generated_specs_that_are_valid_are_taken_by_the_api_server(cluster: Cluster, kinds: None) -> None:
    jobs = accepted()
    assert len(jobs) > scaled(EXAMPLES) // 5
    with fresh_namespace(cluster) as namespace:
        for start in range(0, len(jobs), BATCH):
            errors = refused(cluster, namespace, [document for document, _ in jobs[start : start + BATCH]])
            assert errors == [], "\n".join(errors)


@pytest.mark.hypothesis
def test_api_server_accepts_objects_rendered_from_generated_specs(cluster: Cluster, kinds: None) -> None:
    manifests: dict[str, dict[str, Any]] = {}
    rendered = 0
    with fresh_namespace(cluster) as namespace:
        for number, (_, job) in enumerate(accepted()):
            try:
                planned = plan(job, Facts(served=(TRAINING[number % len(TRAINING)], "job")), CLUSTER_SETTINGS)
            except PlanRefused:
                continue
            rendered += 1
            for manifest in render(planned, RenderContext(namespace, job.spec)):
                manifests[f"{manifest['kind']}/{json.dumps(manifest['metadata'])}"] = dict(manifest)
            if rendered == RENDERED:
                break
        assert rendered == RENDERED
        assert refused(cluster, namespace, list(manifests.values())) == []
