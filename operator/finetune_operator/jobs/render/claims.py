"""Claims that a stage mounts, their mount paths, and the paths of the job's `pvc://` URIs inside the pod.

Every stage writes to the workspace and the cache. Claims with models and data are mounted read-only, and only in the
stages that read them, so that a ReadWriteOnce claim does not block a training on several nodes; the claim for
predictions is writable in that stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from finetune_contract.choices import Stage
from finetune_contract.data_settings import DataSource
from finetune_contract.trainer_job import TrainerJob
from finetune_operator.jobs.render.pod_parts import Mount, Volume, claim_volume, scratch_volume
from finetune_operator.plan.types.names import JobNames
from finetune_operator.plan.types.plan_types import PlanRefused
from finetune_operator.spec.problems import Problem, describe_value
from finetune_operator.spec.types import DNS_SUBDOMAIN_PATTERN, FineTuneJobSpec

WORKSPACE = "/workspace"
CACHE = "/cache"
CLAIMS = "/claims"
_SCHEME = "pvc://"
_CLAIM_NAME = re.compile(DNS_SUBDOMAIN_PATTERN)


@dataclass(frozen=True)
class ClaimPath:
    """A place in a claim."""

    claim: str
    path: str
    """Path below the claim's root, as written; empty for the root itself."""

    @classmethod
    def parse(cls, uri: str, field: str) -> ClaimPath:
        """Parse `uri`, the value of `field`. Raise PlanRefused if it names no claim or leads out of it."""
        claim, _, path = uri.removeprefix(_SCHEME).partition("/")
        if not uri.startswith(_SCHEME) or not _CLAIM_NAME.fullmatch(claim):
            raise _refused(uri, field, "it must name a claim in the job's namespace")
        if ".." in PurePosixPath(path).parts:
            raise _refused(uri, field, "the path must stay inside the claim")
        return cls(claim, path.strip("/"))

    def mounted_at(self, folder: str) -> str:
        """Return the path if the claim's root is mounted at `folder`."""
        return f"{folder}/{self.path}" if self.path else folder


def _refused(uri: str, field: str, rule: str) -> PlanRefused:
    problem = Problem(field, describe_value(uri, field.split(".")), rule, "write pvc://claim or pvc://claim/path")
    return PlanRefused((problem,))


@dataclass(frozen=True)
class Storage:
    """Folders of one stage's pods."""

    workspace: str
    """Folder that holds the job's folder."""
    cache: str | None
    """Folder of the cache that jobs share, in a claim of its own; None if it is in the workspace."""
    volumes: tuple[Volume, ...]
    mounts: tuple[Mount, ...]

    @property
    def hub_cache(self) -> str:
        """Return HF_HOME, the folder of downloads from the Hub."""
        return self.cache or f"{self.workspace}/.cache/huggingface"


def storage(spec: FineTuneJobSpec, names: JobNames, stage: Stage) -> Storage:
    """Return the folders, volumes and mounts of the pods of `stage`."""
    workspace = workspace_place(spec, names)
    serves = stage is Stage.SERVE
    claimed = needs_workspace(spec)
    volumes = {workspace.claim: "workspace"} if claimed else {}
    mounts = [Mount("workspace", WORKSPACE, read_only=serves and claimed)]
    shared = None
    if spec.storage.cache is not None:
        cache = ClaimPath.parse(spec.storage.cache, "spec.storage.cache")
        mounts.append(Mount(volumes.setdefault(cache.claim, "cache"), CACHE))
        shared = cache.mounted_at(CACHE)
    for claim, writable in sorted(_claims_of(spec, stage).items()):
        name = volumes.setdefault(claim, f"claim-{len(volumes)}")
        mounts.append(Mount(name, f"{CLAIMS}/{claim}", read_only=not writable))
    return Storage(
        workspace=workspace.mounted_at(WORKSPACE),
        cache=shared,
        volumes=(
            *(() if claimed else (scratch_volume("workspace"),)),
            *(claim_volume(name, claim) for claim, name in volumes.items()),
        ),
        mounts=tuple(mounts),
    )


def workspace_place(spec: FineTuneJobSpec, names: JobNames) -> ClaimPath:
    """Return the place of the workspace. Raise PlanRefused if spec.storage.workspace names none."""
    if spec.storage.workspace is None:
        return ClaimPath(names.claim, "")
    return ClaimPath.parse(spec.storage.workspace, "spec.storage.workspace")


def needs_workspace(spec: FineTuneJobSpec) -> bool:
    """Return whether a claim holds the job's folder; a job that only serves a model needs none."""
    fields = (spec.training, spec.evaluation, spec.predict, spec.storage.workspace)
    return any(part is not None for part in fields)


def _claims_of(spec: FineTuneJobSpec, stage: Stage) -> dict[str, bool]:
    """Return the claims of `stage`, each with True if the stage writes to it."""
    claims = {ClaimPath.parse(uri, field).claim: False for field, uri in _read_by(spec, stage) if _in_claim(uri)}
    output = None if spec.predict is None else spec.predict.output
    if stage is Stage.PREDICT and output is not None and _in_claim(output):
        claims[ClaimPath.parse(output, "spec.predict.output").claim] = True
    return claims


def _read_by(spec: FineTuneJobSpec, stage: Stage) -> Iterator[tuple[str, str]]:
    """Yield field and URI of the inputs of `stage`. Prepare reads the rows to train and evaluate on, once, and writes
    them to the workspace. A user's own program reads them itself, and the stage that evaluates its model prepares them
    then. Rows to predict are checked by prepare and read by predict.
    """
    yield "spec.model.uri", spec.model.uri
    if spec.endpoint is not None and stage is Stage.SERVE:
        for at, adapter in enumerate(spec.endpoint.adapters):
            yield f"spec.endpoint.adapters[{at}].uri", adapter.uri
    prepares = stage is Stage.PREPARE or spec.script is not None
    if spec.dataset is not None and prepares:
        yield "spec.dataset.uri", spec.dataset.uri
    if spec.predict is not None and spec.predict.dataset is not None and (prepares or stage is Stage.PREDICT):
        yield "spec.predict.dataset.uri", spec.predict.dataset.uri


def _in_claim(uri: str) -> bool:
    return uri.startswith(_SCHEME)


def with_mounted_paths(job: TrainerJob) -> TrainerJob:
    """Return `job` with every `pvc://` URI replaced by the path at which its claim is mounted."""
    predict = job.predict
    if predict is not None:
        output = None if predict.output is None else _mounted_output(predict.output)
        dataset = _mounted_rows(predict.dataset, "spec.predict.dataset.uri")
        predict = predict.model_copy(update={"output": output, "dataset": dataset})
    model = job.model.model_copy(update={"uri": _mounted(job.model.uri, "spec.model.uri")})
    dataset, serving = _mounted_rows(job.dataset, "spec.dataset.uri"), job.serving
    if serving is not None and serving.adapters:
        adapters = tuple(
            adapter.model_copy(update={"uri": _mounted(adapter.uri, f"spec.endpoint.adapters[{at}].uri")})
            for at, adapter in enumerate(serving.adapters)
        )
        serving = serving.model_copy(update={"adapters": adapters})
    return job.model_copy(update={"model": model, "dataset": dataset, "predict": predict, "serving": serving})


def _mounted_output(uri: str) -> str:
    """Return the mounted path; a folder keeps its final slash."""
    place = _mounted(uri, "spec.predict.output")
    return f"{place}/" if uri.endswith("/") and not place.endswith("/") else place


def _mounted_rows(source: DataSource | None, field: str) -> DataSource | None:
    return None if source is None else source.model_copy(update={"uri": _mounted(source.uri, field)})


def _mounted(uri: str, field: str) -> str:
    if not _in_claim(uri):
        return uri
    place = ClaimPath.parse(uri, field)
    return f"file://{place.mounted_at(f'{CLAIMS}/{place.claim}')}"
