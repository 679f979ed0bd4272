"""The cluster from the `finetune` command's view: jobs, their events, their pods, the pods' logs.

All answers are parsed here into typed values for the commands; additional fields of a newer operator are ignored. Every
reason for an unreachable cluster becomes a ClusterError, whose text has a hint. Only jobs are ever written, and only
`finetune prune` deletes other objects.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic import Field, ValidationError

from finetune_contract.choices import Stage
from finetune_operator.jobs.observed import pod_view
from finetune_operator.jobs.render.render_types import JOB_LABEL, UID_LABEL, Manifest
from finetune_operator.jobs.state.decision_types import PodView
from finetune_operator.kubernetes_api import errors
from finetune_operator.kubernetes_api.errors import ApiError, NoClusterError, NotFoundError, in_one_line
from finetune_operator.kubernetes_api.resources import CLAIM, EVENT, FINETUNE_JOB, POD, Resource
from finetune_operator.spec.kubernetes_objects import Meta, Raw
from finetune_operator.spec.types import GROUP, FineTuneJobStatus

if TYPE_CHECKING:
    from finetune_operator.jobs.missing_objects import Answers, NamedObject
    from finetune_operator.kubernetes_api.client import KubernetesClient

MANAGER = "finetune"
"""Field manager and user agent."""
CONNECT_SECONDS = 10.0
READ_SECONDS = 60.0
"""Seconds of silence, in a log that is not followed."""


class ClusterError(Exception):
    """Error of a request that the cluster does not fulfil; the text has a hint."""

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code
        """HTTP status; None if there was no answer."""


class UnreachableError(ClusterError):
    """Error of a missing or incomplete answer; the same call may succeed in a moment."""


# ------------------------------------------------------------------------------------------------------------- answers


class JobMeta(Meta):
    """The job's metadata."""

    resource_version: str = ""


class JobResources(Raw):
    """Shown fields of the job's resources."""

    nodes: int = 1


class JobRunPolicy(Raw):
    """Shown fields of the job's run policy."""

    suspend: bool = False


class JobStorage(Raw):
    """Shown fields of the job's storage."""

    workspace: str | None = None
    retain: str = "keep"


class JobSpec(Raw):
    """Shown fields of the job's spec."""

    task: str = ""
    resources: JobResources = JobResources()
    storage: JobStorage = JobStorage()
    run_policy: JobRunPolicy = JobRunPolicy()


class ClusterJob(Raw):
    """A FineTuneJob of the API server."""

    metadata: JobMeta
    spec: JobSpec = JobSpec()
    status: FineTuneJobStatus = FineTuneJobStatus()
    raw: dict[str, Any] = Field(default_factory=dict, exclude=True)
    """Object as kubectl shows it, for `-o json`."""

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.metadata.name

    @property
    def keeps_results(self) -> bool:
        """Return whether its results outlive it: its claim is deleted with it only if the operator created that."""
        return self.spec.storage.retain != "delete"

    @property
    def outcome(self) -> Literal["Succeeded", "Failed"] | None:
        """Outcome of the job; None before it has ended."""
        ended = {condition.type for condition in self.status.conditions if condition.status == "True"}
        return "Succeeded" if "Succeeded" in ended else "Failed" if "Failed" in ended else None


@dataclass(frozen=True)
class JobEvent:
    """An event of the job."""

    time: datetime
    type: str
    reason: str
    message: str
    count: int


Change: TypeAlias = tuple[Literal["changed", "deleted"], dict[str, Any]]


# ----------------------------------------------------------------------------------------------------------- connection


@dataclass(frozen=True)
class Connection:
    """Choice of the cluster by the command's options."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None


@asynccontextmanager
async def connect(connection: Connection) -> AsyncIterator[Cluster]:
    """Yield the cluster for the time of a `with` block. Raise ClusterError if none can be reached."""
    try:
        from finetune_operator.kubernetes_api.client import KubernetesClient
        from finetune_operator.kubernetes_api.client import connect as connect_client
    except ImportError as missing:
        raise ClusterError(
            f"connecting to a cluster requires packages that are not installed here ({missing.name}); "
            "install finetune-operator[operator]"
        ) from missing
    try:
        api, namespace = await connect_client(MANAGER, connection.kubeconfig, connection.context, proxies=True)
    except NoClusterError as error:
        raise ClusterError(str(error)) from error
    async with api:
        # A person sees at once that the cluster is absent, and commands that follow a job retry by themselves.
        client = KubernetesClient(api, MANAGER, tries=1, connect_seconds=CONNECT_SECONDS)
        yield Cluster(client, connection.namespace or namespace)


# -------------------------------------------------------------------------------------------------------------- reading


class Cluster:
    """A cluster, and the selected namespace."""

    def __init__(self, client: KubernetesClient, namespace: str) -> None:
        self._client = client
        self.namespace = namespace

    async def job(self, name: str) -> ClusterJob:
        """Return the job. Raise ClusterError, which lists the existing jobs, if it does not exist."""
        with self._translated_errors():
            try:
                return parse_job(await self._client.get(FINETUNE_JOB, self.namespace, name))
            except NotFoundError as error:
                existing = [job.name for job in await self.jobs()]
                listed = ", ".join(existing[:10]) + (f" and {len(existing) - 10} more" if len(existing) > 10 else "")
                hint = f"there are {listed}" if existing else "the namespace has none; select another with -n"
                raise ClusterError(
                    f"there is no FineTuneJob {name} in namespace {self.namespace}; {hint}", 404
                ) from error

    async def jobs(self, everywhere: bool = False) -> tuple[ClusterJob, ...]:
        """Return all jobs of the namespace, or of all namespaces."""
        with self._translated_errors():
            try:
                items, _ = await self._client.list_objects(FINETUNE_JOB, None if everywhere else self.namespace)
            except NotFoundError as error:
                raise ClusterError(
                    f"the cluster at {self._client.server} does not serve FineTuneJob: install the operator "
                    "(docs/install.md), or select another --context"
                ) from error
        return tuple(parse_job(item) for item in items)

    async def set_suspended(self, job: ClusterJob, suspended: bool, dry_run: bool = False) -> ClusterJob:
        """Write `runPolicy.suspend` of this very job."""
        return await self._merge(job, {"spec": {"runPolicy": {"suspend": suspended}}}, dry_run)

    async def annotate(self, job: ClusterJob, key: str, value: str | None, dry_run: bool = False) -> ClusterJob:
        """Write an annotation of this very job; None removes it."""
        return await self._merge(job, {"metadata": {"annotations": {key: value}}}, dry_run)

    async def _merge(self, job: ClusterJob, changes: dict[str, Any], dry_run: bool) -> ClusterJob:
        """Merge `changes` into this very job, which its uid identifies."""
        body = {**changes, "metadata": {**changes.get("metadata", {}), "uid": job.metadata.uid}}
        with self._translated_errors():
            return parse_job(
                await self._client.merge(FINETUNE_JOB, job.metadata.namespace, job.name, body, dry_run=dry_run)
            )

    async def delete(self, job: ClusterJob, dry_run: bool = False) -> None:
        """Delete this very job; its dependents are deleted in the background."""
        meta = job.metadata
        with self._translated_errors():
            await self._client.delete(FINETUNE_JOB, meta.namespace, job.name, meta.uid, dry_run=dry_run)

    async def delete_object(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        """Delete this very object of another kind."""
        with self._translated_errors():
            await self._client.delete(resource, namespace, name, uid)

    async def create(self, manifest: Mapping[str, Any], dry_run: bool = False) -> ClusterJob:
        """Create a job; its namespace is the manifest's."""
        namespace = manifest["metadata"]["namespace"]
        with self._translated_errors():
            return parse_job(await self._client.create(dict(manifest), namespace, dry_run=dry_run))

    async def objects(self, job: ClusterJob, resource: Resource) -> list[Manifest]:
        """Return objects of another kind that carry the job's label; none if the kind is not served."""
        with self._translated_errors():
            try:
                return (await self._client.list_objects(resource, job.metadata.namespace, f"{JOB_LABEL}={job.name}"))[0]
            except NotFoundError:
                return []

    async def raw_events(self, job: ClusterJob) -> list[Manifest]:
        """Return the job's events as the API server sends them."""
        fields = f"involvedObject.uid={job.metadata.uid}"
        with self._translated_errors():
            return (await self._client.list_objects(EVENT, job.metadata.namespace, fields=fields))[0]

    async def served_version(self) -> Manifest:
        """Return the API server's version document."""
        with self._translated_errors():
            return await self._client.document("/version", "version")

    @property
    def server(self) -> str:
        """URL of the API server."""
        return self._client.server

    async def claim(self, job: ClusterJob, name: str) -> dict[str, Any] | None:
        """Return a claim in the job's namespace; None if it does not exist."""
        with self._translated_errors():
            try:
                return await self._client.get(CLAIM, job.metadata.namespace, name)
            except NotFoundError:
                return None

    async def document(self, path: str) -> Manifest:
        """Return the API server's answer at a path outside of its resources."""
        with self._translated_errors():
            return await self._client.document(path, "discovery")

    async def serves(self, resource: Resource) -> bool:
        """Return whether the API server serves the resource."""
        with self._translated_errors():
            return await self._client.serves(resource)

    async def object(self, resource: Resource, name: str) -> dict[str, Any]:
        """Return one object that is not namespaced."""
        with self._translated_errors():
            return await self._client.get(resource, None, name)

    async def look_up(self, namespace: str, named: Collection[NamedObject]) -> Answers:
        """Return what exists of the objects that a job names."""
        from finetune_operator.kubernetes_api.lookup import look_up

        with self._translated_errors():
            return await look_up(self._client, namespace, named)

    async def listed(
        self, resource: Resource, namespace: str | None = None, labels: str | None = None
    ) -> tuple[dict[str, Any], ...]:
        """Return objects of any kind, of one namespace or of all."""
        with self._translated_errors():
            return tuple((await self._client.list_objects(resource, namespace, labels))[0])

    async def job_changes(self, job: ClusterJob) -> AsyncGenerator[Change, None]:
        """Yield changes of the job after this version; ends when the server ends the watch, which is then restarted
        from the job's current state.
        """
        version, fields = int(job.metadata.resource_version), f"metadata.name={job.name}"
        events = self._client.watch(FINETUNE_JOB, version, job.metadata.namespace, fields=fields)
        with self._translated_errors(), suppress(errors.GoneError):
            async with aclosing(events):
                async for event in events:
                    if event.type != "BOOKMARK":
                        yield "deleted" if event.type == "DELETED" else "changed", event.object

    async def events(self, job: ClusterJob) -> tuple[JobEvent, ...]:
        """Return the job's events, oldest first; versions order those of the same second, as times are in seconds."""
        by_version = sorted(await self.raw_events(job), key=_version)
        return tuple(sorted(map(_job_event, by_version), key=lambda event: event.time))

    async def pods(self, job: ClusterJob) -> tuple[PodView, ...]:
        """Return the job's pods, by stage, attempt and index."""
        labels = f"{UID_LABEL}={job.metadata.uid}"
        with self._translated_errors():
            items, _ = await self._client.list_objects(POD, job.metadata.namespace, labels)
        views = [pod for item in items if (pod := pod_view(item)) is not None]
        order = {stage: number for number, stage in enumerate(Stage)}
        return tuple(sorted(views, key=lambda pod: (order[pod.stage], pod.attempt, pod.index or 0, pod.name)))

    async def log(
        self, job: ClusterJob, pod: PodView, *, follow: bool = False, tail: int | None = None, since: str | None = None
    ) -> AsyncGenerator[str, None]:
        """Yield the lines of a pod's log, each prefixed with its time."""
        query = {"container": pod.container, "timestamps": "true"}
        query |= {"follow": "true"} if follow else {}
        query |= {} if tail is None else {"tailLines": str(tail)}
        query |= {} if since is None else {"sinceTime": since}
        lines = self._client.log_lines(job.metadata.namespace, pod.name, query, None if follow else READ_SECONDS)
        with self._translated_errors():
            async with aclosing(lines):
                async for line in lines:
                    yield line.decode(errors="replace")

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Raise ClusterError for an ApiError."""
        try:
            yield
        except ApiError as error:
            raise _cluster_error(error, self._client.server) from error


def _cluster_error(error: ApiError, server: str) -> ClusterError:
    """Return the error with a message for people."""
    cause = error.__cause__
    match error:
        case errors.NoAnswerError() if isinstance(cause, TimeoutError):
            return UnreachableError(f"the API server at {server} does not answer in time")
        case errors.NoAnswerError():
            return UnreachableError(
                f"the API server at {server} cannot be reached: {in_one_line(cause or error)}. "
                "Is the cluster up, and is this the right --context?"
            )
        case errors.TooManyRequestsError() | errors.UnavailableError():
            text = f"the API server at {server} cannot answer now ({error.code}: {error.message})"
            return UnreachableError(text, error.code)
        case errors.UnauthorizedError():
            text = f"the API server at {server} does not accept the kubeconfig's credentials; log in again"
        case errors.ForbiddenError() | errors.NamespaceTerminatingError():
            text = (
                f"not allowed: {error.message}. Ask the cluster's administrator for this permission, or use another -n"
            )
        case _:
            text = f"the API server at {server} answered {error.code}: {error.message}"
    return ClusterError(text, error.code)


def as_shown(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object as kubectl shows it: without managed fields."""
    return {**raw, "metadata": {k: v for k, v in raw["metadata"].items() if k != "managedFields"}}


def parse_job(value: dict[str, Any]) -> ClusterJob:
    """Parse a job. Raise ClusterError if this version cannot read it."""
    try:
        # Through JSON: strict models accept a list for a tuple only there.
        return ClusterJob.model_validate_json(json.dumps(value)).model_copy(update={"raw": as_shown(value)})
    except ValidationError as error:
        first = error.errors()[0]
        name = value.get("metadata", {}).get("name")
        place = ".".join(str(part) for part in first["loc"])
        raise ClusterError(
            f"FineTuneJob {name} has a status that this version of finetune cannot read ({place}: {first['msg']}); "
            f"install the version of the cluster's operator ({GROUP})"
        ) from error


def _version(item: Mapping[str, Any]) -> int:
    """Return the version of an object; 0: the server sends none."""
    return int(item["metadata"].get("resourceVersion", 0))


def _job_event(item: Mapping[str, Any]) -> JobEvent:
    series: Mapping[str, Any] = item.get("series") or {}
    times = (series.get("lastObservedTime"), item.get("lastTimestamp"), item.get("eventTime"))
    time = next((text for text in times if text), item["metadata"]["creationTimestamp"])
    return JobEvent(
        time=datetime.fromisoformat(time),
        type=item.get("type") or "Normal",
        reason=item.get("reason") or "",
        message=" ".join((item.get("message") or "").split()),
        count=series.get("count") or item.get("count") or 1,
    )
