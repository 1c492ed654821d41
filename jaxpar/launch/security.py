"""Who may connect to a run's coordinator: this host, or holders of a certificate."""

import contextlib
import ipaddress
import re
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from jaxpar.launch.worker_environment import Tls

AUTHORITY, CERTIFICATE, KEY = "ca.pem", "cert.pem", "key.pem"


def require_secure(address: str, tls: Tls | None, *, insecure: bool) -> None:
    """Refuse to listen where strangers can connect.

    Args:
      address: of this host, where the others reach it.
      tls: the certificates; None for none.
      insecure: whether to go without certificates on purpose.

    Raises:
      ValueError: if the address is not loopback, without either of them.
    """
    if tls is not None or insecure or is_loopback(address):
        return
    raise ValueError(
        f"--address {address}: others can reach it, and JAX's coordinator accepts "
        "every connection. Give the folder of this host's certificates (--tls DIR, "
        "made by `jaxpar launch certs`), or --insecure on a private network"
    )


def is_loopback(address: str) -> bool:
    """Whether only this host can reach an address."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address == "localhost"


def read_tls(folder: Path, address: str | None = None) -> Tls:
    """Find the files of a host's certificates.

    Args:
      folder: as `jaxpar launch certs` made it for this host, or for all of them.
      address: of this host; the name of its own subfolder, if there are several.

    Returns:
      The files.

    Raises:
      FileNotFoundError: if one is missing.
      PermissionError: if others than this user can read the key.
    """
    if address is not None and (folder / address).is_dir():
        folder = folder / address
    for name in (AUTHORITY, CERTIFICATE, KEY):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"--tls {str(folder)!r} has no {name}: make the certificates of all "
                "hosts with `jaxpar launch certs`, and copy this host's folder here"
            )
    require_private(folder / KEY)
    paths = [str((folder / name).absolute()) for name in (CERTIFICATE, KEY, AUTHORITY)]
    return Tls(*paths)


def require_private(key: Path) -> None:
    """Refuse a key that others than this user can read.

    Raises:
      PermissionError: for it.
    """
    mode = key.stat().st_mode
    if mode & 0o077:
        raise PermissionError(
            f"--tls: {str(key)!r} can be read by others (mode {mode & 0o777:o}): "
            "chmod 600 it"
        )


@contextlib.contextmanager
def own_certificates(address: str, say: Callable[[str], None]) -> Iterator[str | None]:
    """Make certificates for workers on one host, of which its other users know nothing.

    Args:
      address: of the host, by which its workers reach each other.
      say: is given a line if the disk takes none.

    Yields:
      Their folder, for the time of the block; None if this jax takes none.
    """
    version = re.findall(r"\d+", metadata.version("jax"))[:3]
    if tuple(map(int, version)) < (0, 11, 2):
        yield None
        return
    # Slow to import.
    from jaxpar.launch.certificates import make_certificates  # noqa: PLC0415

    with contextlib.ExitStack() as stack:
        folder = None
        try:
            made = tempfile.TemporaryDirectory(prefix="jaxpar-tls-")
            place = stack.enter_context(made)
            (folder,) = make_certificates(Path(place), [address])
        except OSError as error:
            say(
                f"other users of this host can connect to the coordinator: there is no "
                f"place for temporary certificates ({error}; TMPDIR has another one)"
            )
        yield None if folder is None else str(folder)
