"""The progress server's certificate, and the authority of our own that signs it.

Pods trust this authority and no other for progress, and it signs nothing but this server: its certificate is in the
ConfigMap of every attempt. Both replicas serve the same one, from a Secret in the operator's namespace; the first
replica creates it, and the API server decides which one that was. The certificate also identifies one replica to the
other (it may be used by clients), which distinguishes a relayed report from one that only claims to be.

Unusable content of the Secret is replaced, with a warning: running pods then report no progress until their next
attempt, and nothing else happens to them. Keys appear in no message.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import ipaddress
import logging
import ssl
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from pydantic import JsonValue

from finetune_operator.jobs.render.render_types import FIELD_OWNER, Manifest

log = logging.getLogger(__name__)

SECRET_NAME = "finetune-operator-tls"
SERVICE_NAME = "finetune-operator-progress"
AUTHORITY_LIFE = timedelta(days=3650)
LEAF_LIFE = timedelta(days=365)
RENEW_AT = 2 / 3
"""Share of a life after which the next certificate is created."""
LOOK_AGAIN = timedelta(minutes=5)
"""Longest time until a replica notices that somebody else replaced the Secret, or reset the webhook's caBundle, without
which no job is admitted.
"""
_CLOCKS_DIFFER = timedelta(minutes=5)
_TRIES = 5
"""Two replicas that both write settle in two rounds; more rounds mean that somebody else writes all the time."""


class UnusableError(ValueError):
    """Certificates cannot be used, for the reason in the text."""


@dataclass(frozen=True)
class Certificates:
    """An authority and a server certificate that it signed, all PEM."""

    authority: str
    authority_key: str = field(repr=False)
    leaf: str
    leaf_key: str = field(repr=False)
    renew_at: datetime
    """Time when the next ones are to be created."""

    @property
    def valid_until(self) -> datetime:
        """Time when clients stop accepting the server certificate."""
        return valid_until(self.leaf)


def valid_until(pem: str) -> datetime:
    """Return the end of the first certificate in a PEM text. Raises ValueError if there is none."""
    return x509.load_pem_x509_certificate(pem.encode()).not_valid_after_utc


def server_names(namespace: str | None, url: str | None) -> tuple[str, ...]:
    """Return the host names and addresses under which the progress server is called."""
    service = [SERVICE_NAME]
    if namespace is not None:
        service += [f"{SERVICE_NAME}.{namespace}{end}" for end in ("", ".svc", ".svc.cluster.local")]
    host = urlsplit(url).hostname if url else None
    return tuple(dict.fromkeys([*service, "localhost", "127.0.0.1", *([host] if host else [])]))


# --------------------------------------------------------------------------------------------------------------- making


def make(names: tuple[str, ...], now: datetime) -> Certificates:
    """Create a new authority, and a server certificate for `names` by it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "finetune-operator authority")])
    authority = (
        _builder(name, name, key.public_key(), now, AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return _signed(authority, key, names, now)


def _signed(
    authority: x509.Certificate, authority_key: ec.EllipticCurvePrivateKey, names: tuple[str, ...], now: datetime
) -> Certificates:
    """Create a new server certificate by an existing authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVICE_NAME)])
    life = min(LEAF_LIFE, authority.not_valid_after_utc - now)
    leaf = (
        _builder(subject, authority.subject, key.public_key(), now, life)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    return Certificates(_pem(authority), _key_pem(authority_key), _pem(leaf), _key_pem(key), _renew_at(authority, leaf))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, life: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name.encode("idna").decode())


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


def _renew_at(*certificates: x509.Certificate) -> datetime:
    return min(
        one.not_valid_before_utc + RENEW_AT * (one.not_valid_after_utc - one.not_valid_before_utc)
        for one in certificates
    )


# -------------------------------------------------------------------------------------------------------------- reading


def read(data: Mapping[str, str], names: tuple[str, ...], now: datetime) -> tuple[Certificates, bool]:
    """Return the certificates in the four entries of the Secret, and whether the server's was recreated just now
    because its time had come or a name was missing. Raises UnusableError if even the authority cannot be used.
    """
    authority, authority_key = _pair(data, "ca")
    _within_life("ca.crt", authority, now)
    if now >= _renew_at(authority):
        raise UnusableError("ca.crt: due for renewal")
    try:
        leaf, leaf_key = _pair(data, "tls")
        _check_leaf(leaf, authority, names, now)
    except UnusableError as error:
        log.info("Issuing a new certificate for the progress server: %s.", error)
        return _signed(authority, authority_key, names, now), True
    certificates = Certificates(
        _pem(authority), _key_pem(authority_key), _pem(leaf), _key_pem(leaf_key), _renew_at(authority, leaf)
    )
    return certificates, False


def _pair(data: Mapping[str, str], name: str) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        certificate = x509.load_pem_x509_certificate(data[f"{name}.crt"].encode())
    except (KeyError, ValueError) as error:
        raise UnusableError(f"{name}.crt: no certificate in PEM") from error
    try:
        key = serialization.load_pem_private_key(data[f"{name}.key"].encode(), None)
    except (KeyError, ValueError, TypeError):
        # Without the library's error, which might show the text that it could not read.
        raise UnusableError(f"{name}.key: no private key in PEM") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise UnusableError(f"{name}.key: not the key of {name}.crt")
    return certificate, key


def _within_life(name: str, certificate: x509.Certificate, now: datetime) -> None:
    if not certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc:
        end = certificate.not_valid_after_utc
        raise UnusableError(f"{name}: not valid now ({certificate.not_valid_before_utc:%Y-%m-%d} to {end:%Y-%m-%d})")


def _check_leaf(leaf: x509.Certificate, authority: x509.Certificate, names: tuple[str, ...], now: datetime) -> None:
    try:
        leaf.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError) as error:
        raise UnusableError("tls.crt: not signed by ca.crt") from error
    _within_life("tls.crt", leaf, now)
    if now >= _renew_at(leaf):
        raise UnusableError("tls.crt: due for renewal")
    try:
        has = set(leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        has = set()
    missing = [name for name in names if _general_name(name) not in has]
    if missing:
        raise UnusableError(f"tls.crt: not issued for {', '.join(missing)}")


# ------------------------------------------------------------------------------------------------------------- keeping


class SecretStore(Protocol):
    """Secrets of the operator's namespace. Failures other than those in the results are raised."""

    async def read_secret(self, namespace: str, name: str) -> Manifest | None:
        """Return the Secret; None: there is none of that name."""
        ...

    async def create_secret(self, namespace: str, secret: Manifest) -> bool:
        """Create the Secret; False: there is one of that name already."""
        ...

    async def replace_secret(self, namespace: str, secret: Manifest) -> bool:
        """Replace the Secret; False: it has changed, or was deleted, since it was read."""
        ...


class CertificateKeeper:
    """Gets certificates that can be used now, and keeps them in the Secret that replicas share.

    Without a Secret (`secrets` or `namespace` None: one process, outside a cluster) they live in memory.
    """

    def __init__(
        self,
        secrets: SecretStore | None,
        namespace: str | None,
        names: tuple[str, ...],
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._secrets = secrets
        self._namespace = namespace
        self._names = names
        self._clock = clock
        self._in_memory: Certificates | None = None

    async def load(self) -> Certificates:
        """Return certificates to serve with until `renew_at`. Raises the errors of the store, and UnusableError if
        somebody else replaces them all the time.
        """
        if self._secrets is None or self._namespace is None:
            now = self._clock()
            if self._in_memory is None or now >= self._in_memory.renew_at:
                self._in_memory = make(self._names, now)
            return self._in_memory
        for attempt in range(_TRIES):
            certificates = await self._agreed(self._secrets, self._namespace)
            if certificates is not None:
                return certificates
            await asyncio.sleep(0.1 * 2**attempt)
        raise UnusableError(
            f"Secret {self._namespace}/{SECRET_NAME} was changed by another client {_TRIES} times in a row; only the "
            "operator may write it"
        )

    async def _agreed(self, secrets: SecretStore, namespace: str) -> Certificates | None:
        """Return the certificates that all replicas see; None: another one was faster, look again."""
        now = self._clock()
        there = await secrets.read_secret(namespace, SECRET_NAME)
        if there is None:
            made = make(self._names, now)
            return made if await secrets.create_secret(namespace, _secret(namespace, made)) else None
        try:
            certificates, changed = read(_decoded(there), self._names, now)
        except UnusableError as error:
            log.warning(
                "Recreating Secret %s/%s (%s). Running pods report no progress until their next attempt.",
                namespace, SECRET_NAME, error,
            )  # fmt: skip
            certificates, changed = make(self._names, now), True
        if changed and not await secrets.replace_secret(namespace, {**there, "data": _data(certificates)}):
            return None
        return certificates


def _secret(namespace: str, certificates: Certificates) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": SECRET_NAME,
            "namespace": namespace,
            "labels": {"app.kubernetes.io/managed-by": FIELD_OWNER},
        },
        "type": "Opaque",
        "data": _data(certificates),
    }


def _data(certificates: Certificates) -> dict[str, JsonValue]:
    entries = {
        "ca.crt": certificates.authority,
        "ca.key": certificates.authority_key,
        "tls.crt": certificates.leaf,
        "tls.key": certificates.leaf_key,
    }
    return {name: base64.b64encode(text.encode()).decode() for name, text in entries.items()}


def _decoded(secret: Manifest) -> dict[str, str]:
    """Return the entries as text; one that is no text is left out, as if it did not exist."""
    data, entries = secret.get("data"), {}
    for name, value in data.items() if isinstance(data, dict) else ():
        with contextlib.suppress(binascii.Error, UnicodeDecodeError):
            entries[name] = base64.b64decode(str(value), validate=True).decode()
    return entries


# ----------------------------------------------------------------------------------------------------------------- TLS


class TlsContexts:
    """TLS contexts of the servers and of the replicas' relay. New certificates are taken over while they are in use:
    open connections stay, new ones get the new certificate.
    """

    def __init__(self, certificates: Certificates) -> None:
        self.server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.server.minimum_version = ssl.TLSVersion.TLSv1_2
        # Pods have no certificate; the other replica shows ours.
        self.server.verify_mode = ssl.CERT_OPTIONAL
        self.relay = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.relay.minimum_version = ssl.TLSVersion.TLSv1_2
        self.webhook = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        """Separate from `server`: other clients show it other certificates."""
        self.webhook.minimum_version = ssl.TLSVersion.TLSv1_2
        self.take(certificates)

    def take(self, certificates: Certificates) -> None:
        """Use these from the next connection on. An earlier authority stays trusted as well, as long as the other
        replica may still show a certificate of it.
        """
        self.authority = certificates.authority
        self.valid_until = certificates.valid_until
        # The ssl module reads keys from files only; this one lives for a moment and is readable by us alone.
        with tempfile.TemporaryDirectory() as folder:
            chain = Path(folder) / "chain.pem"
            chain.touch(mode=0o600)
            chain.write_text(certificates.leaf + certificates.leaf_key, encoding="ascii")
            for context in (self.server, self.relay):
                context.load_verify_locations(cadata=certificates.authority)
            for context in (self.server, self.relay, self.webhook):
                context.load_cert_chain(chain)
