"""Certificates for tests: an authority of one's own, and what it signs."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


class Pair(NamedTuple):
    """Files in PEM: a certificate and its key."""

    cert: str
    key: str


class Authority:
    """Signs certificates; `file` is its own."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        basic = x509.BasicConstraints(ca=True, path_length=None)
        own = self._builder(self._name, self._key.public_key(), DAY).add_extension(basic, critical=True)
        self.file = self._write(f"{name}.pem", own.sign(self._key, hashes.SHA256()).public_bytes(_PEM))

    def sign(self, name: str, *, host: str = "127.0.0.1", left: datetime.timedelta = DAY) -> Pair:
        """A certificate for an address. left: how long it holds from now; negative: it has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = self._builder(subject, key.public_key(), left).add_extension(names, critical=False)
        plain = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        signed = made.sign(self._key, hashes.SHA256()).public_bytes(_PEM)
        return Pair(self._write(f"{name}.crt", signed), self._write(f"{name}.key", plain))

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, left: datetime.timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(self._name, subject, key, x509.random_serial_number())
        return builder.not_valid_before(now - 2 * DAY).not_valid_after(now + left)

    def _write(self, name: str, data: bytes) -> str:
        file = self._directory / name
        file.write_bytes(data)
        return str(file)


_PEM = serialization.Encoding.PEM
