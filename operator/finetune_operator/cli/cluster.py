"""The cluster as the `finetune` command sees it: jobs, their events, their pods, the pods' logs.

Everything that comes back is parsed here into what the commands need; what a newer operator says beside that is
passed over. Every way in which a cluster can be out of reach becomes a ClusterError, whose text says what to do.
Only jobs are ever written.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast
from urllib.parse import quote

from pydantic import Field, ValidationError

from finetune_contract.choices import Stage
from finetune_operator.api.json_text import loads
from finetune_operator.api.objects import Meta, Raw
from finetune_operator.api.types import API_VERSION, GROUP, PLURAL, FineTuneJobStatus
from finetune_operator.reconcile.observed import pod_view
from finetune_operator.reconcile.types import PodView
from finetune_operator.rendering.pods import CONTAINER_NAME
from finetune_operator.rendering.types import JOB_LABEL, UID_LABEL

if TYPE_CHECKING:
    import aiohttp
    from kubernetes.aio.client import ApiClient

CONNECT_SECONDS = 10.0
READ_SECONDS = 60.0
WATCH_SECONDS = 300
"""After this long the API server ends a watch, and it is begun anew."""


class ClusterError(Exception):
    """The cluster does not give what was asked for; the text has the way out."""

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code
        """HTTP status; None when there was no answer."""


class UnreachableError(ClusterError):
    """There was no answer, or not to the end; the same call may work in a moment."""


# ------------------------------------------------------------------------------------------------------ what comes back


class JobMeta(Meta):
    """The job's metadata."""

    resource_version: str = ""


class JobResources(Raw):
    """Of the job's resources, what is shown."""

    nodes: int = 1


class JobRunPolicy(Raw):
    """Of the job's run policy, what is shown."""

    suspend: bool = False


class JobSpec(Raw):
    """Of the job's spec, what is shown."""

    resources: JobResources = JobResources()
    run_policy: JobRunPolicy = JobRunPolicy()


class ClusterJob(Raw):
    """One FineTuneJob as the API server has it."""

    metadata: JobMeta
    spec: JobSpec = JobSpec()
    status: FineTuneJobStatus = FineTuneJobStatus()
    raw: dict[str, Any] = Field(default_factory=dict, exclude=True)
    """The object as kubectl shows it, for `-o json`."""

    @property
    def name(self) -> str:
        """The job's name."""
        return self.metadata.name

    @property
    def outcome(self) -> Literal["Succeeded", "Failed"] | None:
        """How the job ended; None while it has not."""
        ended = {condition.type for condition in self.status.conditions if condition.status == "True"}
        return "Succeeded" if "Succeeded" in ended else "Failed" if "Failed" in ended else None


@dataclass(frozen=True)
class Happening:
    """One event of the job."""

    time: datetime
    type: str
    reason: str
    message: str
    count: int


Change: TypeAlias = tuple[Literal["changed", "deleted"], dict[str, Any]]


# ----------------------------------------------------------------------------------------------------------- connection


@dataclass(frozen=True)
class Connection:
    """Which cluster, as the options of the command name it."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None


@asynccontextmanager
async def connect(connection: Connection) -> AsyncIterator[Cluster]:
    """The cluster for the time of a `with` block. Raises ClusterError when there is no way to one."""
    try:
        from kubernetes.aio.client import ApiClient, Configuration
    except ImportError as missing:
        raise ClusterError(
            f"talking to a cluster needs packages that are not installed here ({missing.name}); "
            "install finetune-operator[operator]"
        ) from missing
    configuration: Any = Configuration()
    namespace = await _configure(configuration, connection)
    async with ApiClient(configuration) as client:
        yield Cluster(client, connection.namespace or namespace)


async def _configure(configuration: Any, connection: Connection) -> str:
    """Fill in server and credentials; gives the namespace that holds when none is named."""
    from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config
    from yaml import YAMLError

    files = _kubeconfigs(connection)
    if connection.kubeconfig is not None and not connection.kubeconfig.is_file():
        raise ClusterError(f"--kubeconfig {connection.kubeconfig}: there is no such file")
    if not any(file.is_file() for file in files):
        if connection.context is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            own = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
            return own.read_text(encoding="utf-8").strip()
        there = ", ".join(str(file) for file in files)
        raise ClusterError(f"no cluster is known here: {there} is not there. Set KUBECONFIG, or give --kubeconfig FILE")
    text = os.pathsep.join(str(file) for file in files)
    _check_context(text, connection.context)
    try:
        loader: Any = await load_kube_config(  # type: ignore[no-untyped-call]
            config_file=text, context=connection.context, client_configuration=configuration, persist_config=False
        )
    except (ConfigException, YAMLError, OSError, KeyError, ValueError, TypeError) as error:
        raise ClusterError(f"the kubeconfig {text} cannot be used: {_in_one_line(error)}") from error
    context: Mapping[str, Any] = loader.current_context.get("context") or {}
    return str(context.get("namespace") or "default")


def is_known(connection: Connection) -> bool:
    """Return whether there is a kubeconfig, or this is a pod."""
    return any(file.is_file() for file in _kubeconfigs(connection)) or "KUBERNETES_SERVICE_HOST" in os.environ


def _kubeconfigs(connection: Connection) -> list[Path]:
    named = str(connection.kubeconfig) if connection.kubeconfig else os.environ.get("KUBECONFIG", "")
    return [Path(file).expanduser() for file in (named or "~/.kube/config").split(os.pathsep) if file]


def _check_context(text: str, wanted: str | None) -> None:
    """ClusterError with the contexts that there are when the wanted one is not among them."""
    from kubernetes.aio.config.kube_config import KubeConfigMerger
    from yaml import YAMLError

    try:
        merged: Any = KubeConfigMerger(text).config  # type: ignore[no-untyped-call]
        value = merged.value if merged is not None else {}
        current = wanted or value.get("current-context") or ""
        contexts = [context["name"] for context in value.get("contexts") or ()]
    except (YAMLError, OSError, AttributeError, KeyError, TypeError) as error:
        raise ClusterError(f"the kubeconfig {text} cannot be read: {_in_one_line(error)}") from error
    there = ", ".join(contexts) or "none"
    if not current:
        raise ClusterError(f"the kubeconfig {text} has no current context; name one with --context (it has {there})")
    if current not in contexts:
        raise ClusterError(f"the kubeconfig {text} has no context {current}; it has {there}")


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# -------------------------------------------------------------------------------------------------------------- reading


class Cluster:
    """One cluster, and the namespace that is meant."""

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self._client = client
        self.namespace = namespace

    async def job(self, name: str) -> ClusterJob:
        """The job. Raises ClusterError, with the jobs that there are, when there is no such one."""
        try:
            return parse_job(await self._get(f"{self._jobs_path()}/{quote(name, safe='')}"))
        except ClusterError as error:
            if error.code != 404:
                raise
            there = [job.name for job in await self.jobs()]
            listed = ", ".join(there[:10]) + (f" and {len(there) - 10} more" if len(there) > 10 else "")
            instead = f"there are {listed}" if there else "it has none; name another with -n"
            raise ClusterError(
                f"there is no FineTuneJob {name} in namespace {self.namespace}; {instead}", 404
            ) from error

    async def jobs(self, everywhere: bool = False) -> tuple[ClusterJob, ...]:
        """All jobs of the namespace, or of all namespaces."""
        path = f"/apis/{API_VERSION}/{PLURAL}" if everywhere else self._jobs_path()
        try:
            listed = await self._get(path)
        except ClusterError as error:
            if error.code != 404:
                raise
            raise ClusterError(
                f"the cluster at {self._server} has no FineTuneJobs: install the operator with "
                "kubectl apply -k manifests/operator, or name another --context"
            ) from error
        return tuple(parse_job({**item, "apiVersion": API_VERSION}) for item in listed.get("items") or ())

    async def set_suspended(self, job: ClusterJob, suspended: bool, dry_run: bool = False) -> ClusterJob:
        """Write `runPolicy.suspend` of this very job."""
        body = {
            "metadata": {"uid": job.metadata.uid},
            "spec": {"runPolicy": {"suspend": suspended}},
        }
        return parse_job(await self._write("PATCH", self._job_path(job), body, dry_run, "application/merge-patch+json"))

    async def delete(self, job: ClusterJob, dry_run: bool = False) -> None:
        """Delete this very job; what it has made goes in the background."""
        body: dict[str, Any] = {"propagationPolicy": "Background", "preconditions": {"uid": job.metadata.uid}}
        # Of a deletion that has a body the API server does not look at the query.
        body |= {"dryRun": ["All"]} if dry_run else {}
        await self._write("DELETE", self._job_path(job), body, dry_run)

    async def create(self, manifest: Mapping[str, Any], dry_run: bool = False) -> ClusterJob:
        """Make a job; its namespace is the manifest's."""
        path = self._jobs_path(manifest["metadata"]["namespace"])
        return parse_job(await self._write("POST", path, manifest, dry_run))

    async def objects(self, job: ClusterJob, api_version: str, plural: str) -> tuple[dict[str, Any], ...]:
        """Objects of another kind that carry the job's label; none where the kind is not served."""
        root = "/api/v1" if api_version == "v1" else f"/apis/{api_version}"
        path = f"{root}/namespaces/{quote(job.metadata.namespace)}/{plural}"
        try:
            listed = await self._get(path, {"labelSelector": f"{JOB_LABEL}={job.name}"})
        except ClusterError as error:
            if error.code == 404:
                return ()
            raise
        kind = str(listed.get("kind", "")).removesuffix("List")
        return tuple({"apiVersion": api_version, "kind": kind, **item} for item in listed.get("items") or ())

    async def raw_events(self, job: ClusterJob) -> tuple[dict[str, Any], ...]:
        """The job's events as the API server has them."""
        path = f"/api/v1/namespaces/{quote(job.metadata.namespace)}/events"
        listed = await self._get(path, {"fieldSelector": f"involvedObject.uid={job.metadata.uid}"})
        return tuple(listed.get("items") or ())

    async def served_version(self) -> dict[str, Any]:
        """What the API server says of itself."""
        return await self._get("/version")

    async def job_changes(self, job: ClusterJob) -> AsyncIterator[Change]:
        """What becomes of the job after this version; ends when the server ends the watch, and is then begun anew
        from the job as it is by then.
        """
        query = {
            "watch": "true",
            "fieldSelector": f"metadata.name={job.name}",
            "resourceVersion": job.metadata.resource_version,
            "timeoutSeconds": WATCH_SECONDS,
        }
        async for line in self._lines(self._jobs_path(job.metadata.namespace), query, WATCH_SECONDS):
            change: Any = loads(line)
            if change["type"] == "ERROR":
                return
            yield ("deleted" if change["type"] == "DELETED" else "changed", change["object"])

    async def events(self, job: ClusterJob) -> tuple[Happening, ...]:
        """The job's events, oldest first."""
        found = [_happening(item) for item in await self.raw_events(job)]
        return tuple(sorted(found, key=lambda event: event.time))

    async def pods(self, job: ClusterJob) -> tuple[PodView, ...]:
        """The job's pods, by stage, attempt and place."""
        path = f"/api/v1/namespaces/{quote(job.metadata.namespace)}/pods"
        listed = await self._get(path, {"labelSelector": f"{UID_LABEL}={job.metadata.uid}"})
        found = [pod for item in listed.get("items") or () if (pod := pod_view(item)) is not None]
        order = {stage: number for number, stage in enumerate(Stage)}
        return tuple(sorted(found, key=lambda pod: (order[pod.stage], pod.attempt, pod.index or 0, pod.name)))

    async def log(
        self, job: ClusterJob, pod: PodView, *, follow: bool = False, tail: int | None = None, since: str | None = None
    ) -> AsyncIterator[str]:
        """The lines of a pod's log, each with its time in front."""
        query: dict[str, Any] = {"container": CONTAINER_NAME, "timestamps": "true"}
        query |= {"follow": "true"} if follow else {}
        query |= {} if tail is None else {"tailLines": tail}
        query |= {} if since is None else {"sinceTime": since}
        path = f"/api/v1/namespaces/{quote(job.metadata.namespace)}/pods/{quote(pod.name)}/log"
        async for line in self._lines(path, query, None if follow else READ_SECONDS):
            yield line.decode(errors="replace")

    def _jobs_path(self, namespace: str | None = None) -> str:
        return f"/apis/{API_VERSION}/namespaces/{quote(namespace or self.namespace, safe='')}/{PLURAL}"

    def _job_path(self, job: ClusterJob) -> str:
        return f"{self._jobs_path(job.metadata.namespace)}/{quote(job.name, safe='')}"

    @property
    def _server(self) -> str:
        host: str = self._client.configuration.host
        return host

    async def _get(self, path: str, query: Mapping[str, Any] | None = None) -> dict[str, Any]:
        async with self._answer(path, query, READ_SECONDS) as response:
            return cast(dict[str, Any], loads(await response.read()))

    async def _write(
        self, method: str, path: str, body: Mapping[str, Any], dry_run: bool, content: str = "application/json"
    ) -> dict[str, Any]:
        query = {"dryRun": "All"} if dry_run else {}
        async with self._answer(path, query, READ_SECONDS, method, body, content) as response:
            return cast(dict[str, Any], loads(await response.read()))

    async def _lines(self, path: str, query: Mapping[str, Any], seconds: float | None) -> AsyncIterator[bytes]:
        """The answer line by line, as it comes; a line may be of any length."""
        rest = b""
        async with self._answer(path, query, seconds) as response:
            async for chunk in response.content.iter_any():
                *whole, rest = (rest + chunk).split(b"\n")
                for line in whole:
                    yield line
        if rest:
            yield rest

    @asynccontextmanager
    async def _answer(
        self,
        path: str,
        query: Mapping[str, Any] | None,
        seconds: float | None,
        method: str = "GET",
        body: Mapping[str, Any] | None = None,
        content: str = "application/json",
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer to a request. Raises ClusterError for one that is no success, and when there is none."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_SECONDS, sock_read=None if seconds is None else seconds + CONNECT_SECONDS
        )
        try:
            headers = {"Accept": "*/*", "User-Agent": "finetune"} | ({} if body is None else {"Content-Type": content})
            call = await self._client.param_serialize(
                method,
                path,
                query_params=[(name, str(value)) for name, value in (query or {}).items()],
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
            )
            answer = await self._client.call_api(*call, _request_timeout=timeout)
            response: aiohttp.ClientResponse = answer.response
            try:
                if response.status not in (200, 201, 202):
                    raise self._refused(response.status, await response.read())
                yield response
            finally:
                response.close()
        except TimeoutError as error:
            raise UnreachableError(f"the API server at {self._server} does not answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            raise UnreachableError(
                f"the API server at {self._server} cannot be reached: {_in_one_line(error)}. "
                "Is the cluster up, and is this the right --context?"
            ) from error

    def _refused(self, code: int, body: bytes) -> ClusterError:
        message = body.decode(errors="replace").strip()
        with suppress(ValueError, AttributeError):
            refusal: Any = loads(body)
            message = refusal.get("message") or message
        match code:
            case 401:
                text = f"the API server at {self._server} does not accept the kubeconfig's credentials; log in again"
            case 403:
                text = f"not allowed: {message}. Ask the cluster's administrator for that right, or name another -n"
            case 429 | 500 | 502 | 503 | 504:
                return UnreachableError(f"the API server at {self._server} cannot answer now ({code}: {message})", code)
            case _:
                text = f"the API server at {self._server} answered {code}: {message}"
        return ClusterError(text, code)


def as_shown(raw: Mapping[str, Any]) -> dict[str, Any]:
    """An object as kubectl shows it: who has written which field is left out."""
    return {**raw, "metadata": {k: v for k, v in raw["metadata"].items() if k != "managedFields"}}


def parse_job(value: dict[str, Any]) -> ClusterJob:
    """Raises ClusterError for a job that this version cannot read."""
    try:
        # Through JSON: strict models take a list for a tuple only there.
        return ClusterJob.model_validate_json(json.dumps(value)).model_copy(update={"raw": as_shown(value)})
    except ValidationError as error:
        first = error.errors()[0]
        name = value.get("metadata", {}).get("name")
        place = ".".join(str(part) for part in first["loc"])
        raise ClusterError(
            f"FineTuneJob {name} has a status that this version of finetune cannot read ({place}: {first['msg']}); "
            f"install the version that the cluster's operator has ({GROUP})"
        ) from error


def _happening(item: Mapping[str, Any]) -> Happening:
    series: Mapping[str, Any] = item.get("series") or {}
    times = (series.get("lastObservedTime"), item.get("lastTimestamp"), item.get("eventTime"))
    time = next((text for text in times if text), item["metadata"]["creationTimestamp"])
    return Happening(
        time=datetime.fromisoformat(time),
        type=item.get("type") or "Normal",
        reason=item.get("reason") or "",
        message=" ".join((item.get("message") or "").split()),
        count=series.get("count") or item.get("count") or 1,
    )
