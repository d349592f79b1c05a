"""Secrets of a deployment, into `made` beside this file: `python infra/k8s/secrets/make.py [DIRECTORY]`.

Keys and accounts of the broker (as `pdq nats accounts` makes them), its certificate and the authority behind it, the
key of JetStream and that of tenants' KV. What is there stays: to renew the certificate, remove tls.crt and tls.key and
run this again. Whoever has it has the deployment; without variables.conf the broker's volumes cannot be read.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pdq.accounts import Keyring

AUTHORITY_DAYS, SERVER_DAYS = 3_650, 365
NAMES = ("nats", "nats.pdq", "nats.pdq.svc", "nats.pdq.svc.cluster.local", "*.nats-headless.pdq.svc.cluster.local")
"""Of the broker's Service and nodes; with 127.0.0.1 and localhost, for whoever forwards a port."""

_PEM = serialization.Encoding.PEM


def make(directory: Path) -> list[str]:
    """Write what is missing; the names of the files that were written. Raises OSError, ValueError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = [str(file.relative_to(directory)) for file in Keyring(directory).write().made]
    for name, content in (
        ("variables.conf", lambda: f'JETSTREAM_KEY: "{secrets.token_hex(32)}"\n'.encode()),
        ("kv.key", lambda: secrets.token_bytes(32)),
        ("ca.key", _new_key),
        ("ca.crt", lambda: _authority(_key(directory / "ca.key"))),
        ("tls.key", _new_key),
        ("tls.crt", lambda: _server(directory)),
    ):
        if _write(directory / name, content):
            made.append(name)
    return made


def _write(file: Path, content: Callable[[], bytes]) -> bool:
    """Whole or not at all; what is there stays."""
    if file.exists():
        return False
    new = file.with_name(file.name + ".new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(content())
    new.replace(file)
    return True


def _new_key() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _key(file: Path) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(file.read_bytes(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def _authority(key: ec.EllipticCurvePrivateKey) -> bytes:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pdq broker authority")])
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        _builder(name, name, key, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(own, critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(_PEM)


def _server(directory: Path) -> bytes:
    authority = x509.load_pem_x509_certificate((directory / "ca.crt").read_bytes())
    signer = _key(directory / "ca.key")
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAMES[0])])
    hosts: list[x509.GeneralName] = [x509.DNSName(host) for host in (*NAMES, "localhost")]
    hosts.append(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    certificate = (
        _builder(name, authority.subject, _key(directory / "tls.key"), SERVER_DAYS)
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(issuer, critical=False)
        .sign(signer, hashes.SHA256())
    )
    return certificate.public_bytes(_PEM)


def _builder(name: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder(issuer, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("made")
    for name in make(target):
        print(f"made {target / name}")
