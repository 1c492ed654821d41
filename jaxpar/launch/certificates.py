"""How do hosts authenticate each other? By certificates of the run's own authority."""

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from jaxpar.launch.security import AUTHORITY, CERTIFICATE, KEY

_SKEW = datetime.timedelta(hours=1)
"""Tolerated difference of the hosts' clocks."""


def make_certificates(
    folder: Path, hosts: Sequence[str], *, days: int = 30
) -> list[Path]:
    """Make a private authority, and a certificate for each host.

    The authority's key is not stored: no host can be added later.

    Args:
      folder: made, or empty.
      hosts: names or addresses at which the coordinator will be reached.
      days: validity of the certificates.

    Returns:
      A folder for each host, with ca.pem, cert.pem and key.pem, to be copied to it.

    Raises:
      ValueError: if there are no hosts, a host is given twice or is not a valid name,
        or days is not above 0.
      FileExistsError: if the folder has files.
    """
    if not hosts or len(set(hosts)) < len(hosts):
        raise ValueError(f"hosts: {list(hosts)} must be different names, at least one")
    if days <= 0:
        raise ValueError(f"days is {days}; it must be above 0")
    names = [_subject(host) for host in hosts]
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(
            f"{str(folder)!r} has files: give a new folder, so that certificates in "
            "use are not overwritten"
        )
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    own_key = ec.generate_private_key(ec.SECP256R1())
    own_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "jaxpar run")])
    authority = _sign(own_name, own_key, own_name, own_key, until, [_IS_AUTHORITY])
    made = []
    for host, name in zip(hosts, names, strict=True):
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
        certificate = _sign(
            subject, key, own_name, own_key, until, [(name, False), *_IS_PEER]
        )
        place = folder / host
        place.mkdir(parents=True, mode=0o700)
        _write(place / AUTHORITY, authority.public_bytes(serialization.Encoding.PEM))
        _write(
            place / CERTIFICATE, certificate.public_bytes(serialization.Encoding.PEM)
        )
        _write(
            place / KEY,
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )
        made.append(place)
    return made


_IS_AUTHORITY = (x509.BasicConstraints(ca=True, path_length=0), True)
_IS_PEER = [
    (x509.BasicConstraints(ca=False, path_length=None), True),
    (
        x509.ExtendedKeyUsage(
            [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        ),
        False,
    ),
]


def _sign(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    until: datetime.datetime,
    extensions: Sequence[tuple[x509.ExtensionType, bool]],
) -> x509.Certificate:
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime.now(datetime.UTC) - _SKEW)
        .not_valid_after(until)
    )
    for extension, is_critical in extensions:
        builder = builder.add_extension(extension, critical=is_critical)
    return builder.sign(issuer_key, hashes.SHA256())


def _subject(host: str) -> x509.SubjectAlternativeName:
    """The host's address or name, as a certificate's subject."""
    if not host or "/" in host or host.startswith("."):
        raise ValueError(f"hosts: {host!r} is not a name or address of a host")
    try:
        return x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
    except ValueError:
        return x509.SubjectAlternativeName([x509.DNSName(host)])


def _write(path: Path, content: bytes) -> None:
    """Create a file that only this user can ever read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
