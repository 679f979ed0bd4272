"""Self-signed certificates for servers on loopback."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate and its key, as PEM files."""

    certificate: Path
    key: Path

    def server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        return context


def for_loopback(folder: Path, name: str, days: int = 2) -> Certificate:
    """Create a certificate for 127.0.0.1 and localhost in `folder`."""
    return for_hosts(folder, name, names=("localhost",), addresses=("127.0.0.1",), days=days)


def for_hosts(
    folder: Path, name: str, *, names: Iterable[str] = (), addresses: Iterable[str] = (), days: int = 2
) -> Certificate:
    """Create a certificate for hosts by their names and addresses, in `folder`."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    hosts: list[x509.GeneralName] = [x509.DNSName(each) for each in names]
    hosts += [x509.IPAddress(ipaddress.ip_address(each)) for each in addresses]
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    pair = Certificate(folder / f"{name}.crt", folder / f"{name}.key")
    pair.certificate.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    pair.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return pair
