"""The progress server's certificates: contents, agreement between replicas, and the effect of a damaged Secret."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store

from cluster_support.self_signed import Certificate, for_loopback
from finetune_operator.controller.servers.certificates import (
    LEAF_LIFE,
    SECRET_NAME,
    CertificateKeeper,
    Certificates,
    TlsContexts,
    UnusableError,
    make,
    server_names,
)
from finetune_operator.controller.servers.webhook import BOUNDS, ClientAuthorities, FolderCertificate, WebhookServer
from finetune_operator.jobs.admission import JOBS
from finetune_operator.jobs.render.render_types import Manifest
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS
from kopf_support import answering

NOW = datetime.now(UTC).replace(microsecond=0)
NAMES = server_names("ops", None)
DAY = timedelta(days=1)


def loaded(pem: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem.encode())


@dataclass
class Secrets:
    """A namespace's Secrets with the API server's rules: one object of a name, and no write over a newer version."""

    stored: Manifest | None = None
    version: int = 0
    writes: int = 0
    before_write: list[Callable[[], None]] = field(default_factory=list)
    """Functions called once each, one before a write, as a faster writer."""

    def put(self, secret: Manifest) -> None:
        self.version += 1
        copy = json.loads(json.dumps(secret))
        copy["metadata"]["resourceVersion"] = str(self.version)
        self.stored = copy

    def _interfere(self) -> None:
        if self.before_write:
            self.before_write.pop(0)()

    async def read_secret(self, namespace: str, name: str) -> Manifest | None:
        assert (namespace, name) == ("ops", SECRET_NAME)
        await asyncio.sleep(0)
        return json.loads(json.dumps(self.stored)) if self.stored is not None else None

    async def create_secret(self, namespace: str, secret: Manifest) -> bool:
        self._interfere()
        await asyncio.sleep(0)
        if self.stored is not None:
            return False
        self.writes += 1
        self.put(secret)
        return True

    async def replace_secret(self, namespace: str, secret: Manifest) -> bool:
        self._interfere()
        await asyncio.sleep(0)
        given: Any = secret
        now: Any = self.stored
        if now is None or given["metadata"]["resourceVersion"] != now["metadata"]["resourceVersion"]:
            return False
        self.writes += 1
        self.put(secret)
        return True

    def entries(self) -> dict[str, str]:
        stored: Any = self.stored
        return {name: base64.b64decode(value).decode() for name, value in stored["data"].items()}


@dataclass
class Clock:
    now: datetime = NOW

    def __call__(self) -> datetime:
        return self.now


def keeper(secrets: Secrets | None, clock: Clock | None = None, names: tuple[str, ...] = NAMES) -> CertificateKeeper:
    return CertificateKeeper(secrets, "ops", names, clock or Clock())


def load(*keepers: CertificateKeeper) -> Sequence[Certificates]:
    """Load with all keepers at once and return their certificates."""

    async def go() -> Sequence[Certificates]:
        return await asyncio.gather(*(one.load() for one in keepers))

    return asyncio.run(go())


ALWAYS = ["finetune-operator-progress", "localhost", "127.0.0.1"]
NAMED: dict[str, tuple[str | None, str | None, list[str]]] = {
    "in a namespace": (
        "ops",
        None,
        [
            "finetune-operator-progress",
            "finetune-operator-progress.ops",
            "finetune-operator-progress.ops.svc",
            "finetune-operator-progress.ops.svc.cluster.local",
            "localhost",
            "127.0.0.1",
        ],
    ),
    "behind an address of its own": (None, "https://Progress.example.com:8443", [*ALWAYS, "progress.example.com"]),
    "behind an IP address": (None, "https://[fd00::1]:1", [*ALWAYS, "fd00::1"]),
    "behind a name that is there already": (None, "https://localhost", ALWAYS),
    "behind a name beyond ASCII": (None, "https://b\u00fccher.example", [*ALWAYS, "xn--bcher-kva.example"]),
}


@pytest.mark.parametrize("case", NAMED)
def test_the_server_certificate_is_made_out_to_all_its_names(case: str) -> None:
    namespace, url, expected = NAMED[case]
    made = make(server_names(namespace, url), NOW)
    names = loaded(made.leaf).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == expected


def test_certificate_serves_both_sides_and_the_authority_only_signs() -> None:
    made = make(NAMES, NOW)
    authority, leaf = loaded(made.authority), loaded(made.leaf)
    store = Store([authority])
    PolicyBuilder().store(store).time(NOW).build_server_verifier(x509.DNSName(NAMES[2])).verify(leaf, [])
    PolicyBuilder().store(store).time(NOW).build_client_verifier().verify(leaf, [])
    usage = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    limits = authority.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (limits.ca, limits.path_length) == (True, 0)
    assert authority.not_valid_after_utc == NOW + 3650 * DAY
    assert leaf.not_valid_after_utc == NOW + 365 * DAY
    assert timedelta(days=243) < made.renew_at - NOW < timedelta(days=244)


def test_no_key_is_shown_when_certificates_are_printed() -> None:
    assert "PRIVATE" not in repr(make(NAMES, NOW))


def test_the_first_one_makes_the_secret_and_later_ones_use_it() -> None:
    secrets = Secrets()
    (first,) = load(keeper(secrets))
    (second,) = load(keeper(secrets))
    assert first == second
    assert secrets.writes == 1
    stored: Any = secrets.stored
    assert (stored["type"], stored["metadata"]["name"], stored["metadata"]["namespace"]) == (
        "Opaque",
        SECRET_NAME,
        "ops",
    )
    assert secrets.entries() == {
        "ca.crt": first.authority,
        "ca.key": first.authority_key,
        "tls.crt": first.leaf,
        "tls.key": first.leaf_key,
    }


def test_replicas_that_start_at_once_agree() -> None:
    secrets = Secrets()
    found = load(*(keeper(secrets) for _ in range(4)))
    assert len({one.leaf for one in found}) == 1
    assert secrets.writes == 1


def test_replicas_that_renew_at_once_agree_and_keep_the_authority() -> None:
    secrets = Secrets()
    (first,) = load(keeper(secrets))
    clock = Clock(first.renew_at)
    found = load(*(keeper(secrets, clock) for _ in range(3)))
    assert len({one.leaf for one in found}) == 1
    assert found[0].leaf != first.leaf
    assert found[0].authority == first.authority
    assert found[0].renew_at > clock.now + 200 * DAY
    assert secrets.writes == 2


def test_nothing_is_written_before_the_time_has_come() -> None:
    secrets = Secrets()
    (first,) = load(keeper(secrets))
    assert load(keeper(secrets, Clock(first.renew_at - timedelta(seconds=1)))) == [first]
    assert secrets.writes == 1


def test_a_new_name_in_the_settings_is_added_under_the_same_authority() -> None:
    secrets = Secrets()
    (first,) = load(keeper(secrets))
    (second,) = load(keeper(secrets, names=server_names("ops", "https://progress.example.com")))
    assert second.authority == first.authority
    assert "progress.example.com" in str(
        loaded(second.leaf).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    )


def test_authority_is_replaced_at_two_thirds_of_its_life() -> None:
    secrets = Secrets()
    (first,) = load(keeper(secrets))
    clock = Clock(NOW)
    while clock.now < NOW + 3650 * DAY:
        (now,) = load(keeper(secrets, clock))
        assert loaded(now.leaf).not_valid_after_utc <= loaded(now.authority).not_valid_after_utc
        assert now.renew_at > clock.now
        clock.now = now.renew_at
    assert now.authority != first.authority


def damaged(entries: dict[str, str | None]) -> Callable[[dict[str, Any]], None]:
    """Return a change that sets entries to text, and deletes those set to None."""

    def change(data: dict[str, Any]) -> None:
        for name, value in entries.items():
            if value is None:
                del data[name]
            else:
                data[name] = base64.b64encode(value.encode()).decode()

    return change


STRANGER = make(NAMES, NOW)
EXPIRED = make(NAMES, NOW - 4000 * DAY)
DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "empty": (lambda data: data.clear(), "ca.crt: no certificate in PEM"),
    "not base64": (lambda data: data.update({"ca.crt": "%%%"}), "ca.crt: no certificate in PEM"),
    "not text": (lambda data: data.update({"ca.crt": "/w=="}), "ca.crt: no certificate in PEM"),
    "without the authority's key": (damaged({"ca.key": None}), "ca.key: no private key in PEM"),
    "with a cut key": (damaged({"ca.key": STRANGER.authority_key[:80]}), "ca.key: no private key in PEM"),
    "with another key": (damaged({"ca.key": STRANGER.authority_key}), "ca.key: not the key of ca.crt"),
    "with an authority that has expired": (
        damaged({"ca.crt": EXPIRED.authority, "ca.key": EXPIRED.authority_key}),
        "ca.crt: not valid now",
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_unusable_secret_is_recreated_with_a_warning(case: str, caplog: pytest.LogCaptureFixture) -> None:
    change, reason = DAMAGES[case]
    secrets = Secrets()
    (first,) = load(keeper(secrets))
    stored: Any = secrets.stored
    change(stored["data"])
    with caplog.at_level(logging.WARNING):
        (second,) = load(keeper(secrets))
    assert second.authority != first.authority
    assert secrets.entries()["ca.crt"] == second.authority
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"Recreating Secret ops/{SECRET_NAME} ({reason}" in caplog.text
    assert "PRIVATE" not in caplog.text
    assert load(keeper(secrets)) == [second]


LEAF_DAMAGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "is not there": damaged({"tls.crt": None}),
    "has another key": damaged({"tls.key": STRANGER.leaf_key}),
    "is of another authority": damaged({"tls.crt": STRANGER.leaf, "tls.key": STRANGER.leaf_key}),
}


@pytest.mark.parametrize("case", LEAF_DAMAGES)
def test_unusable_server_certificate_is_reissued_by_the_same_ca(case: str) -> None:
    secrets = Secrets()
    (first,) = load(keeper(secrets))
    stored: Any = secrets.stored
    LEAF_DAMAGES[case](stored["data"])
    (second,) = load(keeper(secrets))
    assert second.authority == first.authority
    loaded(second.leaf).verify_directly_issued_by(loaded(first.authority))
    assert secrets.entries()["tls.crt"] == second.leaf


def test_secret_deleted_during_renewal_is_recreated() -> None:
    secrets = Secrets()
    (first,) = load(keeper(secrets))
    secrets.before_write.append(lambda: setattr(secrets, "stored", None))
    (second,) = load(keeper(secrets, Clock(first.renew_at)))
    assert second.authority != first.authority
    assert secrets.entries()["ca.crt"] == second.authority


def test_constant_writes_to_the_secret_are_reported() -> None:
    secrets = Secrets()
    (first,) = load(keeper(secrets))

    def touch() -> None:
        assert secrets.stored is not None
        secrets.put(secrets.stored)

    secrets.before_write.extend([touch] * 5)
    with pytest.raises(UnusableError, match="was changed by another client 5 times in a row; only the operator may"):
        load(keeper(secrets, Clock(first.renew_at)))


def test_outside_a_cluster_certificates_live_in_memory_and_are_renewed_too() -> None:
    clock = Clock()
    alone = CertificateKeeper(None, None, NAMES, clock)
    (first,) = load(alone)
    assert load(alone) == [first]
    clock.now = first.renew_at
    (second,) = load(alone)
    assert second.leaf != first.leaf


def test_tls_contexts_accept_each_other_and_leave_no_key_on_disk(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tls = TlsContexts(make(NAMES, NOW))
    assert list(tmp_path.iterdir()) == []
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = tls.server.wrap_bio(to_server, to_client, server_side=True)
    client = tls.relay.wrap_bio(to_client, to_server, server_hostname=NAMES[0])
    open_ends = [client, server]
    for _ in range(10):
        for end in list(open_ends):
            try:
                end.do_handshake()
                open_ends.remove(end)
            except ssl.SSLWantReadError:
                continue
    assert open_ends == []
    assert server.getpeercert() != {}


# ---------------------------------------------------------------------------------------------- somebody else's


def put(folder: Path, pair: Certificate, *parts: str) -> None:
    """Write the pair into the folder as new files."""
    for part in parts or ("tls.key", "tls.crt"):
        source = pair.key if part == "tls.key" else pair.certificate
        (folder / part).unlink(missing_ok=True)
        (folder / part).write_text(source.read_text())


def shown(server: ssl.SSLContext) -> bytes | None:
    """Return the certificate that a client sees, as DER."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [context.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    for _ in range(10):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return ends[0].getpeercert(binary_form=True)


def test_renewed_certificate_of_a_folder_is_loaded_with_its_expiry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (for_loopback(tmp_path, f"number-{days}", days) for days in (2, 3))
    folder = tmp_path / "theirs"
    folder.mkdir()
    put(folder, first)
    theirs = FolderCertificate(folder)
    seen, until = shown(theirs.context), theirs.valid_until
    assert seen == ssl.PEM_cert_to_DER_cert(first.certificate.read_text())

    # Half a pair: the old certificate is shown until a later look sees the rest.
    put(folder, second, "tls.crt")
    theirs.reload_if_changed()
    assert (shown(theirs.context), theirs.valid_until) == (seen, until)
    assert "could not be reloaded" in caplog.text

    put(folder, second)
    theirs.reload_if_changed()
    assert shown(theirs.context) == ssl.PEM_cert_to_DER_cert(second.certificate.read_text())
    assert abs(theirs.valid_until - until - DAY) < timedelta(minutes=1)


def test_the_end_of_our_own_certificate_is_that_of_the_one_in_use() -> None:
    old, new = make(NAMES, NOW), make(NAMES, NOW + DAY)
    tls = TlsContexts(old)
    assert tls.valid_until == NOW + LEAF_LIFE
    tls.take(new)
    assert tls.valid_until == NOW + DAY + LEAF_LIFE


# --------------------------------------------------------------------------------------------- clients of the webhook


class NoJobs:
    """A `webhook.World` without jobs."""

    def jobs(self) -> list[Any]:
        return []

    async def served(self) -> list[Any]:
        return []


REVIEW = {
    "apiVersion": "admission.k8s.io/v1",
    "kind": "AdmissionReview",
    "request": {
        "uid": "u",
        "operation": "DELETE",
        "resource": JOBS,
        "userInfo": {},
        "oldObject": {"metadata": {"name": "a"}},
    },
}


async def response_code(server: ssl.SSLContext, client: ssl.SSLContext, names: Sequence[str] = ()) -> int | str:
    """Return the status of the webhook's answer, or `no connection`."""
    webhook = WebhookServer(NoJobs(), server, client_names=names)
    webhook.answer.set_result(answering(CLUSTER_SETTINGS))
    port = await webhook.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as session:
            url = f"https://localhost:{port}/validate"
            async with session.post(url, json=REVIEW, ssl=client) as answer:
                return answer.status
    except (aiohttp.ClientError, ssl.SSLError, ConnectionError):
        return "no connection"
    finally:
        await webhook.stop()


def client_with(pair: Certificate | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if pair is not None:
        context.load_cert_chain(pair.certificate, pair.key)
    return context


def test_webhook_with_client_authorities_answers_only_their_clients(tmp_path: Path) -> None:
    server, ours, other, later = (
        for_loopback(tmp_path, name) for name in ("server", "kube-apiserver", "other", "later")
    )
    file = tmp_path / "authorities.pem"
    file.write_text(ours.certificate.read_text())
    context = server.server_context()
    assert asyncio.run(response_code(context, client_with(None))) not in ("no connection", 403)
    authorities = ClientAuthorities(file, context)
    found = {name: asyncio.run(response_code(context, client_with(pair))) for name, pair in
             {"none": None, "ours": ours, "other": other, "later": later}.items()}  # fmt: skip
    open_ = found.pop("ours")
    assert open_ == 200
    assert set(found.values()) == {"no connection"}
    # By name, if only one of several clients of an authority may ask.
    assert asyncio.run(response_code(context, client_with(ours), ["kube-apiserver"])) == open_
    assert asyncio.run(response_code(context, client_with(ours), ["somebody else"])) == 403
    # An authority added to the file counts after the next look.
    file.write_text(ours.certificate.read_text() + later.certificate.read_text())
    os.utime(file, ns=(1, 1))
    authorities.reload_if_changed()
    assert asyncio.run(response_code(context, client_with(later))) == open_


def test_unauthorized_clients_cannot_exhaust_the_webhook_connections(tmp_path: Path) -> None:
    """The authority may sign for many clients, as a cluster's own does for each kubelet."""
    server, ours, other = (for_loopback(tmp_path, name) for name in ("server", "kube-apiserver", "kubelet"))
    file = tmp_path / "authorities.pem"
    file.write_text(ours.certificate.read_text() + other.certificate.read_text())
    context = server.server_context()
    ClientAuthorities(file, context)

    async def scene() -> int:
        webhook = WebhookServer(NoJobs(), context, client_names=["kube-apiserver"])
        webhook.answer.set_result(answering(CLUSTER_SETTINGS))
        port = await webhook.start("127.0.0.1", 0)
        idle = [
            await asyncio.open_connection("127.0.0.1", port, ssl=client_with(other)) for _ in range(BOUNDS.connections)
        ]
        try:
            async with aiohttp.ClientSession() as session:
                url = f"https://localhost:{port}/validate"
                async with session.post(url, json=REVIEW, ssl=client_with(ours)) as answer:
                    return answer.status
        finally:
            for _, writer in idle:
                writer.transport.abort()
            await webhook.stop()

    assert asyncio.run(scene()) == 200


@pytest.mark.parametrize("text", [None, "", "no certificate"])
def test_file_without_ca_certificates_is_refused(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "authorities.pem"
    if text is not None:
        file.write_text(text)
    with pytest.raises(OSError, match=str(file)):
        ClientAuthorities(file, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
