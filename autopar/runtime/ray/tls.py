"""TLS between the processes of one cluster: a key that is made for it and handed out with the secret."""

from __future__ import annotations

import datetime
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar._compat.files import write_private
from autopar.errors import ClusterError
from autopar.errors.base import optional_module
from autopar.runtime.transport.channels import Credentials

_NAME = "autopar"
_VALID = datetime.timedelta(days=3650)


@dataclass(frozen=True)
class Identity:
    """A key and its certificate, in PEM.

    Args:
        certificate: signed by itself; who has it trusts it alone.
        key: of it.
    """

    certificate: bytes
    key: bytes = field(repr=False)


def _cryptography(module: str) -> Any:
    """A module of cryptography. ClusterError where it is not installed."""
    missing = ClusterError(
        "encrypted connections between machines need cryptography, which cannot be imported",
        cause="it is not installed",
        remedy="pip install 'autopar[tls]'",
    )
    return optional_module(f"cryptography.{module}", "cryptography", missing)


def new_identity() -> Identity:
    """A key for one cluster. ClusterError where cryptography is not installed."""
    x509, primitives = _cryptography("x509"), "hazmat.primitives"
    hashes, serialization = _cryptography(f"{primitives}.hashes"), _cryptography(f"{primitives}.serialization")
    ec = _cryptography(f"{primitives}.asymmetric.ec")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, _NAME)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks of machines differ
        .not_valid_after(now + _VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Identity(certificate.public_bytes(serialization.Encoding.PEM), text)


def credentials_of(secret: bytes, identity: Identity | None) -> Credentials:
    """Credentials with which a process connects.

    Args:
        secret: what connections begin with.
        identity: of the cluster; None leaves connections as they are, as on loopback.
    """
    if identity is None:
        return Credentials(secret)
    return Credentials(secret, _context(identity, ssl.PROTOCOL_TLS_SERVER), _context(identity, ssl.PROTOCOL_TLS_CLIENT))


def _context(identity: Identity, protocol: int) -> ssl.SSLContext:
    """Both sides show the cluster's certificate and take no other."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # machines have any address; the certificate is that of the cluster
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=identity.certificate.decode())
    with tempfile.TemporaryDirectory(prefix="autopar-") as folder:  # ssl reads keys from files only
        path = Path(folder, "identity.pem")
        write_private(path, identity.certificate + identity.key)
        context.load_cert_chain(path)
    return context
