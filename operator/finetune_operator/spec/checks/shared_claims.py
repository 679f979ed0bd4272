"""Claims that several pods of a job mount: access modes with which all but the first node, or pod, wait for ever.

The rule holds for the claim that the operator would create with the settings' access modes, which validation checks,
and for a claim that exists, whose access modes only a cluster knows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from finetune_operator.spec.fields.field_values import Path
from finetune_operator.spec.launcher_rows import LAUNCHERS
from finetune_operator.spec.problems import Problem, format_path
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.types import FineTuneJobSpec

WORKSPACE: Path = ("storage", "workspace")
ONE_NODE, ONE_POD, SHARED = "ReadWriteOnce", "ReadWriteOncePod", ("ReadWriteMany", "ReadOnlyMany")
HOST_LABEL = "kubernetes.io/hostname"
_WITH_STARTER = frozenset(launcher.name for launcher in LAUNCHERS if launcher.starter_pod is not None)


def shared_claim_problems(spec: FineTuneJobSpec, settings: Settings) -> Iterator[Problem]:
    """Yield the problem of a workspace that the operator would create, with the access modes of the settings."""
    modes = settings.defaults.access_modes
    if spec.storage.workspace is None and modes:
        field, pods = _most_pods(spec, WORKSPACE)
        rule = _refusal(spec, pods, modes)
        if rule is not None:
            hint = f"{_way_out(modes)}, or name a ReadWriteMany claim in storage.workspace"
            whole = f"{pods} pods would mount the workspace, which {rule} (defaults.accessModes of the settings)"
            yield Problem(format_path(("spec", *field)), None, whole, hint, reason="Forbidden")


def claim_problem(spec: FineTuneJobSpec, path: Path, name: str, modes: Collection[str]) -> Problem | None:
    """Return the problem of an existing claim with these access modes, which the job names at `path`."""
    field, pods = _most_pods(spec, path)
    rule = _refusal(spec, pods, modes)
    if rule is None:
        return None
    hint = f"{_way_out(modes)}, or use a ReadWriteMany claim"
    by = format_path(("spec", *field))
    return Problem(format_path(("spec", *path)), f'"{name}"', f"{pods} pods mount the claim ({by}), which {rule}", hint)


def _refusal(spec: FineTuneJobSpec, pods: int, modes: Collection[str]) -> str | None:
    """Return the rule that so many pods break."""
    if pods < 2 or any(mode in modes for mode in SHARED):
        return None
    if ONE_POD in modes:
        return f"is {ONE_POD}: for one pod only"
    return None if HOST_LABEL in spec.template.node_selector else f"is {ONE_NODE}: for one node only"


def _way_out(modes: Collection[str]) -> str:
    on_one = "" if ONE_POD in modes else f", set {HOST_LABEL} in template.nodeSelector"
    return f"use one pod{on_one}"


def _most_pods(spec: FineTuneJobSpec, path: Path) -> tuple[Path, int]:
    """Return the largest number of pods that mount the claim of this field at the same time, and the field that sets
    it. Servers are not counted: their endpoint reports a node that lacks the claim, and others may do.
    """
    predicting = 0 if spec.predict is None or spec.predict.workers == "auto" else spec.predict.workers
    training = 0 if spec.training is None else spec.resources.nodes + (spec.launcher in _WITH_STARTER)
    counts: dict[Path, int] = {
        ("resources", "nodes"): training,
        ("preparation", "workers"): spec.preparation.pods,
        ("predict", "workers"): predicting,
    }
    match path:
        case ("dataset", *_):
            read_in_training = spec.script is not None
            kept = ("preparation", *(("resources",) if read_in_training else ()))
        case ("predict", "output"):
            kept = ("predict",)
        case ("predict", *_):
            kept = ("preparation", "predict", *(("resources",) if spec.script is not None else ()))
        case ("endpoint", *_):
            kept = ()
        case _:
            kept = ("resources", "preparation", "predict")
    mounting = {field: count for field, count in counts.items() if field[0] in kept}
    return max(mounting.items(), key=lambda item: item[1], default=(path, 0))
