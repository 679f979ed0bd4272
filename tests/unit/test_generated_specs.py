"""Generated specs: validating, planning and rendering hold for all of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given

from finetune_operator.jobs.launchers.launcher_registry import render
from finetune_operator.jobs.render.render_types import (
    ENDPOINT_ANNOTATION,
    HASH_ANNOTATION,
    REVISION_ANNOTATION,
    Manifest,
    Owner,
    ProgressEndpoint,
    RenderContext,
)
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Facts, PlanRefused
from finetune_operator.spec.checks.validation import validate_job
from finetune_operator.spec.launcher_rows import TRAINING
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS
from finetune_operator.spec.types import FineTuneJob
from generated_specs import NASTY, specs
from suite_plugins.fuzz import examples, scaled

EXAMPLES = scaled(150, everything=400)
LAUNCHERS = TRAINING
FRAME = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": {"name": "fuzz"}}


def rendered(job: FineTuneJob, launcher: str) -> tuple[Manifest, ...]:
    """Return everything that the operator would create for `job` if the cluster serves `launcher`."""
    limits = CLUSTER_SETTINGS.model_copy(update={"served_launchers": (launcher, "job")})
    planned = plan(job, Facts(), limits)
    context = RenderContext(
        "team-a", job.spec, limits, Owner("fuzz", "11-22"), ProgressEndpoint("https://o:8443", "PEM")
    )
    return render(planned, context)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of every leaf; JSON inside a ConfigMap is parsed."""
    match value:
        case dict():
            for name, inner in value.items():
                text = isinstance(inner, str) and name.endswith(".json")
                yield from leaves(json.loads(inner) if text else inner, f"{path}.{name}")
        case list():
            for number, inner in enumerate(value):
                yield from leaves(inner, f"{path}[{number}]")
        case _:
            yield path, value


def plain(value: Any, texts: dict[str, str]) -> Any:
    """Return the spec with every hostile text replaced by a harmless word of its own."""
    match value:
        case dict():
            return {name: plain(inner, texts) for name, inner in value.items()}
        case list():
            return [plain(inner, texts) for inner in value]
        case str() if value in NASTY:
            return texts.setdefault(value, f"harmless{len(texts)}")
        case _:
            return value


@examples(150, everything=400, suppress_health_check=list(HealthCheck))
@given(specs())
def check(counts: Counter[str], spec: dict[str, Any]) -> None:
    job, problems = validate_job({**FRAME, "spec": spec}, CLUSTER_SETTINGS)
    if job is None or problems:
        counts["invalid"] += 1
        assert problems
        assert all(problem.path and problem.rule and problem.hint for problem in problems)
        return
    counts["valid"] += 1
    launcher = spec.get("launcher", LAUNCHERS[counts["valid"] % len(LAUNCHERS)])
    launcher = "job" if launcher == "auto" else launcher
    try:
        manifests = rendered(job, launcher)
    except PlanRefused:
        counts["refused"] += 1
        return
    counts[launcher] += 1
    check_manifests(spec, job, launcher, manifests)


def check_manifests(spec: dict[str, Any], job: FineTuneJob, launcher: str, manifests: tuple[Manifest, ...]) -> None:
    found = dict(leaves(list(manifests)))
    assert [path for path, value in found.items() if value == "auto" and ".template.spec.affinity" not in path] == []
    # YAML and JSON readers restore the same values.
    text = yaml.dump_all(manifests, Dumper=yaml.CSafeDumper)
    assert list(yaml.load_all(text, Loader=yaml.CSafeLoader)) == list(manifests)
    assert json.loads(json.dumps(manifests)) == list(manifests)
    # With harmless words in place of hostile ones, the objects have the same form and differ only in those words.
    texts: dict[str, str] = {}
    harmless, problems = validate_job({**FRAME, "spec": plain(spec, texts)}, CLUSTER_SETTINGS)
    if not texts or harmless is None or problems:
        return
    back = {name: text for text, name in texts.items()}
    expected = {
        path.replace(name, text): back.get(value, value) if isinstance(value, str) else value
        for path, value in leaves(list(rendered(harmless, launcher)))
        for name, text in (next(((w, t) for w, t in back.items() if w in path), ("", "")),)
    }
    differing = {path for path in {*found, *expected} if found.get(path) != expected.get(path)}
    assert {path for path in differing if not hashed(path) and not escaped(found, expected, path)} == set()


def hashed(path: str) -> bool:
    """Return whether the path is of a digest annotation, which depends on other objects' texts."""
    return any(each in path for each in (HASH_ANNOTATION, ENDPOINT_ANNOTATION, REVISION_ANNOTATION))


def escaped(found: dict[str, Any], expected: dict[str, Any], path: str) -> bool:
    """Return whether only dollars are doubled: the kubelet expands $(NAME) in a variable's value and reads $$ as $."""
    there, meant = found.get(path), expected.get(path)
    return isinstance(there, str) and isinstance(meant, str) and ".env[" in path and there == meant.replace("$", "$$")


@pytest.mark.hypothesis
def test_generated_specs_are_refused_with_reasons_or_fully_rendered() -> None:
    counts: Counter[str] = Counter()
    check(counts)
    print(dict(counts))
    assert all(counts[launcher] > EXAMPLES // 25 for launcher in LAUNCHERS), counts
    assert counts["invalid"] > EXAMPLES // 10, counts
