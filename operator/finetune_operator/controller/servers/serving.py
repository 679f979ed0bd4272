"""The operator's servers as one service: started before it works, stopped after it.

This connects the servers' own small views of an operator (`World`, `Health`, `SecretStore`, `TokenReviewer`,
`KeySource`) with its state. The servers themselves know nothing of it.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from finetune_contract.choices import Stage
from finetune_operator.controller.cluster.kube import Kube
from finetune_operator.controller.reconcile.operator_state import OperatorState
from finetune_operator.controller.servers.certificates import (
    LOOK_AGAIN,
    SECRET_NAME,
    SERVICE_NAME,
    CertificateKeeper,
    Certificates,
    TlsContexts,
    UnusableError,
    server_names,
)
from finetune_operator.controller.servers.operator_metrics import Metrics
from finetune_operator.controller.servers.probes import HTTP_PORT, Endpoints, Faults, Heartbeat
from finetune_operator.controller.servers.progress_protocol import AttemptKey, merged_progress
from finetune_operator.controller.servers.progress_server import PORT, KnownPod, ProgressServer
from finetune_operator.controller.servers.token_keys import KeyReviewer, KeysUnavailableError
from finetune_operator.controller.servers.tokens import ReviewUnavailableError, TokenReviewer, Verdict, verdict
from finetune_operator.controller.servers.webhook import (
    Answer,
    ClientAuthorities,
    FolderCertificate,
    WebhookOptions,
    WebhookServer,
    write_authority,
)
from finetune_operator.controller.store.queue import JobKey
from finetune_operator.jobs.fleet_metrics import Fleet, fleet
from finetune_operator.jobs.missing_objects import LookUp, compare, named_by
from finetune_operator.jobs.render.render_types import Manifest, ProgressEndpoint
from finetune_operator.jobs.state.decision_types import Findings, JobView, PodView
from finetune_operator.kubernetes_api.errors import (
    AlreadyExistsError,
    ApiError,
    ConflictError,
    ForbiddenError,
    NotFoundError,
)
from finetune_operator.kubernetes_api.lookup import look_up
from finetune_operator.kubernetes_api.resources import POD, SECRET, TOKEN_REVIEW
from finetune_operator.spec.launcher_rows import LauncherName
from finetune_operator.spec.types import FineTuneJob, ProgressStatus

log = logging.getLogger(__name__)

SOONEST = timedelta(minutes=1)
"""Shortest interval between two checks of the certificates, also if the API server gives no answer."""
MOST_LOOKED_UP = 16
"""Objects of one job that an answer of the webhook waits for; a job names three or four."""
_COUNTED_BY_POD_0 = (Stage.PREPARE, Stage.PREDICT)
"""Stages whose pods divide the rows: pod 0 counts those of all, others only their own, which shows that they work."""
_WITHOUT_REVIEW = " Grant `create` on tokenreviews, or set progress.tokens to keys, which needs no right."
_ALTERNATIVE = "or grant `create` on tokenreviews and set progress.tokens to review"
_WITHOUT_DISCOVERY = (
    "restore the ClusterRoleBinding system:service-account-issuer-discovery, by which Kubernetes lets all service "
    f"accounts read them, {_ALTERNATIVE}"
)
_WITHOUT_ISSUER = (
    f"set --service-account-issuer of the API server to an https URL, which publishing them requires, {_ALTERNATIVE}"
)


class KubeReviewer:
    """A `tokens.TokenReviewer` that asks the API server about each token."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube

    async def review_token(self, token: str, audience: str) -> Verdict:
        """See `tokens.TokenReviewer`."""
        review: Manifest = {
            "apiVersion": TOKEN_REVIEW.api_version,
            "kind": TOKEN_REVIEW.kind,
            "spec": {"token": token, "audiences": [audience]},
        }
        try:
            status = (await self._kube.create(review)).get("status")
        except ApiError as error:
            # Without the API server's message, which might repeat the request.
            log.warning(
                "A token of a progress report could not be reviewed: %d %s.%s",
                error.code,
                error.reason,
                _WITHOUT_REVIEW if isinstance(error, ForbiddenError) else "",
            )
            raise ReviewUnavailableError from None
        return verdict(status if isinstance(status, dict) else {}, audience)


class KubeKeys:
    """Keys that the API server publishes."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube

    async def read_issuer(self) -> tuple[Manifest, Manifest]:
        """See `token_keys.KeySource`."""
        try:
            return await self._kube.token_issuer()
        except ForbiddenError as error:
            raise KeysUnavailableError(f"{error}; {_WITHOUT_DISCOVERY}") from error
        except NotFoundError as error:
            raise KeysUnavailableError(f"{error}; {_WITHOUT_ISSUER}") from error
        except ApiError as error:
            raise KeysUnavailableError(str(error)) from error


class KubeSecrets:
    """Secrets on the API server."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube

    async def read_secret(self, namespace: str, name: str) -> Manifest | None:
        """See `certificates.SecretStore`."""
        try:
            return await self._kube.get(SECRET, namespace, name)
        except NotFoundError:
            return None

    async def create_secret(self, namespace: str, secret: Manifest) -> bool:
        """See `certificates.SecretStore`."""
        try:
            await self._kube.create(secret, namespace)
        except AlreadyExistsError:
            return False
        return True

    async def replace_secret(self, namespace: str, secret: Manifest) -> bool:
        """See `certificates.SecretStore`."""
        try:
            await self._kube.replace(secret, namespace, SECRET_NAME)
        except (ConflictError, NotFoundError):
            return False
        return True


class OperatorView:
    """The servers' view of an operator."""

    def __init__(self, state: OperatorState, progress_port: int = PORT) -> None:
        self._state = state
        self._port = progress_port

    def leading(self) -> bool:
        """See `progress_server.World`."""
        return self._state.leading.is_set()

    def synced(self) -> bool:
        """See `progress_server.World`."""
        return self._state.synced.is_set()

    def leader(self) -> tuple[str, int] | None:
        """See `progress_server.World`."""
        address = self._state.leader_address()
        return None if address is None else (address, self._port)

    def pod(self, namespace: str, name: str) -> KnownPod | None:
        """See `progress_server.World`. Pods of a deleted job belong to none."""
        entry = self._state.store.get(POD.group_kind, namespace, name)
        if entry is None or not isinstance(entry.view, PodView) or not self._state.store.belongs(entry):
            return None
        job = self._state.store.job(entry.job)
        if job is None or job.uid != entry.job_uid:
            return None
        attempt = AttemptKey(namespace, entry.job.name, entry.view.stage, entry.view.attempt)
        return KnownPod(entry.uid, entry.job_uid, attempt, entry.view.index)

    def report(self, pod: KnownPod, progress: ProgressStatus, findings: Findings, mark: str) -> None:
        """Note a report in the progress book; the reconciler limits how often the status is written."""
        at, book = pod.attempt, self._state.progress
        attempt = (pod.job_uid, at.stage, at.attempt)
        if at.stage in _COUNTED_BY_POD_0 and pod.index:
            progress = ProgressStatus(last_update_time=progress.last_update_time)
            mark = f"pod {pod.index}: {mark}"
        merged, combined = merged_progress(book.of(*attempt), progress), findings.after(book.findings_of(*attempt))
        book.note(*attempt, merged, mark, self._state.now(), combined)
        self._state.queue.add(JobKey(at.namespace, at.job))

    def report_lost(self) -> None:
        """See `progress_server.World`."""
        self._state.report_window.report_lost()

    def jobs(self) -> list[JobView]:
        """See `webhook.World`."""
        views = [self._state.store.job(key) for key in self._state.store.jobs()]
        return [job for job in views if job is not None]

    async def served(self) -> Collection[LauncherName]:
        """See `webhook.World`."""
        try:
            return await self._state.served()
        except ApiError:
            return ()

    async def look_up(self, namespace: str, job: FineTuneJob) -> LookUp:
        """See `webhook.World`. The operator has no right to read Secrets of others."""
        named = [one for one in named_by(job, self._state.settings) if one.kind != SECRET.kind][:MOST_LOOKED_UP]
        try:
            return compare(job, named, await look_up(self._state.kube, namespace, named), namespace)
        except ApiError:
            return LookUp()

    def fleet(self) -> Fleet:
        """Return the state of all jobs, as they are known here now."""
        return fleet(self.jobs(), self._state.now(), self._last_progress_at)

    def _last_progress_at(self, job: JobView) -> datetime | None:
        running = next((stage for stage in job.status.stages if stage.state == "Running"), None)
        return (
            None if running is None else self._state.progress.last_progress_at(job.uid, running.name, running.attempt)
        )

    def missing(self) -> Sequence[str]:
        """See `endpoints.Health`."""
        return [] if self.synced() else ["the objects have not all been listed from the API server yet"]


class Servers:
    """Probes and metrics, the progress server if the settings enable it, and the webhook if it is requested."""

    def __init__(
        self,
        metrics: Metrics,
        liveness: Faults,
        *,
        heartbeat: Heartbeat | None = None,
        host: str | None = None,
        http_port: int = HTTP_PORT,
        progress_port: int = PORT,
        webhook: WebhookOptions | None = None,
    ) -> None:
        """`host` None: all addresses. Port 0: any free one, then found in `http_port`, `progress_port` and
        `webhook_port`.
        """
        self.http_port = http_port
        self.webhook_port = 0 if webhook is None else webhook.port
        self.progress_port = progress_port
        self._metrics = metrics
        self._liveness = liveness
        self._heartbeat = heartbeat
        self._host = host
        self._endpoints: Endpoints | None = None
        self._progress: ProgressServer | None = None
        self._webhook_options = webhook
        self._webhook: WebhookServer | None = None
        self._renewing: list[asyncio.Task[None]] = []

    async def start(self, state: OperatorState) -> None:
        """Serve. OSError if a port is in use; ApiError if the certificates cannot be read or stored."""
        view = OperatorView(state, self.progress_port)
        self._metrics.follow_jobs(view.fleet)
        self._metrics.follow_queue(lambda: len(state.queue))
        self._metrics.follow_leading(view.leading)
        self._endpoints = Endpoints(view, self._liveness, self._metrics, self._heartbeat)
        self.http_port = await self._endpoints.start(self._host, self.http_port)
        url, hook = state.settings.progress.url, self._webhook_options
        progress = state.settings.progress.enabled
        if progress and url is None and not state.namespace:
            log.warning(
                "Progress is not served: the operator has no namespace, and so no Service for pods to call. Set "
                "progress.url in the settings to the address at which pods reach this process."
            )
            progress = False
        if hook is not None and hook.certificate is not None:
            external = FolderCertificate(hook.certificate)
            await self._start_webhook(state, view, hook, external.context)
            self._metrics.follow_certificate("webhook", lambda: external.valid_until)
            self._keep(state, external.follow(), "renewal of the webhook's certificate")
        if not progress and (hook is None or hook.certificate is not None):
            return
        keeper = CertificateKeeper(
            KubeSecrets(state.kube) if state.namespace else None,
            state.namespace or None,
            server_names(state.namespace or None, url),
        )
        certificates = await keeper.load()
        tls = TlsContexts(certificates)
        users: list[Callable[[Certificates], Awaitable[None]]] = []
        if progress:
            base_url = url or f"https://{SERVICE_NAME}.{state.namespace}.svc:{PORT}"
            users.append(await self._start_progress(state, view, tls, base_url))
            self._metrics.follow_certificate("progress", lambda: tls.valid_until)
        if hook is not None and hook.certificate is None:
            await self._start_webhook(state, view, hook, tls.webhook)
            self._metrics.follow_certificate("webhook", lambda: tls.valid_until)
            if hook.configuration is not None:
                users.append(_authority_writer(state.kube, hook.configuration))
        for use in users:
            await use(certificates)
        self._keep(state, _renew(keeper, certificates, tls, users), "renewal of the certificates")

    def _keep(self, state: OperatorState, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._renewing.append(task)
        state.tasks.append(task)

    async def _start_progress(
        self, state: OperatorState, view: OperatorView, tls: TlsContexts, base_url: str
    ) -> Callable[[Certificates], Awaitable[None]]:
        """Return the function to call with each new certificate."""
        reviewer = await self._reviewer(state)
        self._progress = ProgressServer(view, reviewer, tls, counted=self._metrics.progress_post)
        self.progress_port = await self._progress.start(self._host, self.progress_port)

        async def publish(certificates: Certificates) -> None:
            state.progress_endpoint = ProgressEndpoint(base_url, certificates.authority, state.namespace or None)

        return publish

    async def _reviewer(self, state: OperatorState) -> TokenReviewer:
        """Return the reviewer that the settings name. There is no fallback: it would hide a missing right."""
        match state.settings.progress.tokens:
            case "review":
                log.info("Tokens of progress reports are reviewed by the API server (progress.tokens: review).")
                return KubeReviewer(state.kube)
            case "keys":
                log.info("Tokens of progress reports are verified by public keys (progress.tokens: keys).")
                reviewer = KeyReviewer(KubeKeys(state.kube))
                await reviewer.renew()
                self._keep(state, reviewer.follow(), "renewal of the keys of tokens")
                return reviewer

    async def _start_webhook(
        self, state: OperatorState, view: OperatorView, options: WebhookOptions, tls: ssl.SSLContext
    ) -> None:
        if options.clients is not None:
            authorities = ClientAuthorities(options.clients, tls)
            self._keep(state, authorities.follow(), "renewal of the authorities of the webhook's clients")
            log.info("The webhook accepts only clients with a certificate signed by a CA in %s.", options.clients)
        self._webhook = WebhookServer(view, tls, self._metrics.webhook_review, options.client_names)
        self.webhook_port = await self._webhook.start(self._host, options.port)

    def answer_reviews(self, answer: Answer) -> None:
        """Have the webhook's reviews answered so, after `start`; those that came before wait for it."""
        if self._webhook is not None:
            self._webhook.answer.set_result(answer)

    async def stop(self) -> None:
        """Stop, also after a start that failed."""
        for task in self._renewing:
            task.cancel()
        await asyncio.gather(*self._renewing, return_exceptions=True)
        for server in (self._webhook, self._progress, self._endpoints):
            if server is not None:
                await server.stop()
        self._renewing, self._webhook, self._progress, self._endpoints = [], None, None, None


def _authority_writer(kube: Kube, configuration: str) -> Callable[[Certificates], Awaitable[None]]:
    """Return a function that makes the configuration trust our authority. It logs errors: jobs run without it."""

    async def write(certificates: Certificates) -> None:
        try:
            await write_authority(kube, configuration, certificates.authority)
        except ApiError as error:
            log.warning(
                "The operator's CA certificate was not written to ValidatingWebhookConfiguration %s: %s",
                configuration,
                error,
            )

    return write


async def _renew(
    keeper: CertificateKeeper,
    certificates: Certificates,
    tls: TlsContexts,
    users: Sequence[Callable[[Certificates], Awaitable[None]]],
) -> None:
    """Take over new certificates, and renew them when their time has come; for ever. All users are called each time, as
    somebody may have removed their earlier result.
    """
    while True:
        due = min(LOOK_AGAIN, certificates.renew_at - datetime.now(UTC))
        await asyncio.sleep(max(SOONEST, due).total_seconds())
        try:
            newest = await keeper.load()
        except (ApiError, UnusableError) as error:
            log.warning("The certificates could not be checked: %s", error)
            continue
        if newest != certificates:
            log.info("Loaded new certificates.")
            tls.take(newest)
            certificates = newest
        for use in users:
            await use(certificates)
