"""How do hosts authenticate each other? By certificates of the run's own authority.

The authority's key stays in the folder where the certificates were made. Where it is, a
run's certificates are renewed before they end; elsewhere their end is announced.
"""

import datetime
import ipaddress
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from jaxpar.launch.security import AUTHORITY, CERTIFICATE, KEY, require_private
from jaxpar.launch.worker_environment import Tls

AUTHORITY_KEY = "authority-key.pem"
DAYS = 365
"""Validity of certificates, unless another one is asked for."""

_SKEW = datetime.timedelta(hours=1)
"""Tolerated difference of the hosts' clocks."""
_DUE = 1 / 3
"""Share of their life with which certificates are renewed."""


def make_certificates(
    folder: Path, hosts: Sequence[str], *, days: int = DAYS
) -> list[Path]:
    """Make a private authority, and a certificate for each host.

    Args:
      folder: made for this user alone, or empty; it also gets the authority's key.
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
    _require_days(days)
    names = [_subject(host) for host in hosts]
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(
            f"{str(folder)!r} has files: give a new folder, so that certificates in "
            "use are not overwritten"
        )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority = ec.generate_private_key(ec.SECP256R1())
    _write(folder / AUTHORITY_KEY, _private(authority))
    peers = []
    for host, name in zip(hosts, names, strict=True):
        key = ec.generate_private_key(ec.SECP256R1())
        (folder / host).mkdir(mode=0o700)
        _write(folder / host / KEY, _private(key))
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
        peers.append((folder / host, subject, key.public_key(), name))
    return _sign(peers, authority, days)


def renew_certificates(folder: Path, *, days: int = DAYS) -> list[Path]:
    """Sign the certificates of all hosts anew; keys and authority stay the same.

    Those of before stay valid until their own end, and both work together: hosts need
    not get theirs at one time. Workers read them when they start.

    Args:
      folder: as `make_certificates` left it.
      days: validity from now on.

    Returns:
      A folder for each host.

    Raises:
      FileNotFoundError: if the folder has no key of the authority.
      PermissionError: if others than this user can read it.
      ValueError: if days is not above 0, or a host's certificates are of another
        authority.
    """
    _require_days(days)
    path = folder / AUTHORITY_KEY
    if not path.is_file():
        raise FileNotFoundError(
            f"{str(folder)!r} has no {AUTHORITY_KEY}: renew certificates where they "
            "were made (--out), or make new ones for all hosts"
        )
    require_private(path)
    authority = serialization.load_pem_private_key(path.read_bytes(), None)
    places = sorted(each.parent for each in folder.glob(f"*/{CERTIFICATE}"))
    for place in places:
        if _read(place / AUTHORITY).public_key() != authority.public_key():
            raise ValueError(
                f"{str(place)!r} has certificates of another authority than "
                f"{str(path)!r}: move one of them away"
            )
    peers = []
    for place in places:
        old = _read(place / CERTIFICATE)
        name = old.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        peers.append((place, old.subject, old.public_key(), name.value))
    return _sign(peers, authority, days)


def keep_valid(tls: Tls, say: Callable[[str], None]) -> None:
    """Renew a run's certificates if they end soon, or say when they end.

    They are renewed once a third of their life is left, for as long as before, if the
    authority's key is beside this host's folder.

    Args:
      tls: of this host.
      say: is given a line.

    Raises:
      ValueError: if they have ended and can't be renewed here.
    """
    share, until = _left(tls.certificate)
    if share > _DUE:
        return
    folder = Path(tls.authority).parents[1]
    try:
        life = _read(tls.certificate)
        days = (life.not_valid_after_utc - life.not_valid_before_utc - _SKEW).days
        renew_certificates(folder, days=max(days, 1))
    except (OSError, ValueError) as error:
        remedy = (
            f"they can't be renewed here ({error}). Run `jaxpar launch certs --renew "
            "--out DIR` where they were made, and copy the hosts' folders"
        )
        if share <= 0:
            raise ValueError(
                f"--tls: {tls.certificate!r} has ended on {until}, and {remedy}; then "
                "start again"
            ) from error
        say(f"the certificates of --tls end on {until}, and {remedy} before")
    else:
        say(f"certificates renewed: they are valid until {_left(tls.certificate)[1]}")


def _left(certificate: str) -> tuple[float, str]:
    """The share of a certificate's life that is left, and the day of its end."""
    found = _read(certificate)
    begin, end = found.not_valid_before_utc, found.not_valid_after_utc
    left = end - datetime.datetime.now(datetime.UTC)
    return left / (end - begin), f"{end:%Y-%m-%d}"


def _read(path: Path | str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(Path(path).read_bytes())


def _require_days(days: int) -> None:
    if days <= 0:
        raise ValueError(f"days is {days}; it must be above 0")


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


_AUTHORITY_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "jaxpar run")])


def _sign(
    peers: Sequence[tuple[Path, x509.Name, Any, x509.SubjectAlternativeName]],
    authority: Any,
    days: int,
) -> list[Path]:
    """Write the certificates of hosts and of their authority; the hosts' folders."""
    now = datetime.datetime.now(datetime.UTC)

    def signed(
        subject: x509.Name,
        key: Any,
        extensions: Sequence[tuple[x509.ExtensionType, bool]],
    ) -> bytes:
        builder = x509.CertificateBuilder(
            issuer_name=_AUTHORITY_NAME,
            subject_name=subject,
            public_key=key,
            serial_number=x509.random_serial_number(),
            not_valid_before=now - _SKEW,
            not_valid_after=now + datetime.timedelta(days=days),
        )
        for extension, is_critical in extensions:
            builder = builder.add_extension(extension, critical=is_critical)
        made = builder.sign(authority, hashes.SHA256())
        return made.public_bytes(serialization.Encoding.PEM)

    own = signed(_AUTHORITY_NAME, authority.public_key(), [_IS_AUTHORITY])
    for place, subject, key, name in peers:
        _write(place / AUTHORITY, own)
        _write(place / CERTIFICATE, signed(subject, key, [(name, False), *_IS_PEER]))
    return [place for place, *_ in peers]


def _subject(host: str) -> x509.SubjectAlternativeName:
    """The host's address or name, as a certificate's subject."""
    if not host or "/" in host or host.startswith("."):
        raise ValueError(f"hosts: {host!r} is not a name or address of a host")
    try:
        return x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
    except ValueError:
        return x509.SubjectAlternativeName([x509.DNSName(host)])


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write(path: Path, content: bytes) -> None:
    """Replace a file by one that only this user can ever read."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    new = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(new, "wb") as file:
        file.write(content)
    os.replace(unfinished, path)
