"""Which cluster of Ray does a run use, and who else could use it?

A running one, with its token; or one that is started on this host for the run alone,
listens on the loopback address, and has its own token in a private file.
"""

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxpar.launch.extras import import_extra
from jaxpar.launch.security import is_loopback

_TOKEN_BYTES = 32
_OBJECT_STORE_BYTES = 128 * 1024**2


@contextlib.contextmanager
def connected(address: str | None, processes: int, *, insecure: bool) -> Iterator[Any]:
    """Connect to a cluster of Ray that requires a token.

    Args:
      address: of a running one; None to start one on this host for the block.
      processes: workers that the one on this host has room for.
      insecure: use one that requires no token.

    Yields:
      The module ``ray``.

    Raises:
      ValueError: if the running one requires no token.
      ModuleNotFoundError: if Ray is not installed.
      RuntimeError: if a cluster on this host would listen where others can connect.
    """
    with contextlib.ExitStack() as at_end:
        quiet = {"log_to_driver": False, "logging_level": "WARNING"}
        if address is not None:
            _require_token_mode(insecure=insecure)
            ray = import_ray()
            at_end.callback(ray.shutdown)
            ray.init(address=address, **quiet)
            yield ray
            return
        private = at_end.enter_context(
            # Ray's processes may still be writing files.
            tempfile.TemporaryDirectory(prefix="jaxpar-", ignore_cleanup_errors=True)
        )
        _set_up_private_cluster(Path(private))
        ray = import_ray()
        at_end.callback(ray.shutdown)
        ray.init(
            address="local",
            num_cpus=processes,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            # One level down: Ray opens its folder to all users.
            _temp_dir=str(Path(private, "ray")),
            **quiet,
        )
        own = ray.util.get_node_ip_address()
        if not is_loopback(own):
            raise RuntimeError(
                f"Ray listens on {own}, where others can connect: it was imported "
                "before its settings were made. Launch from a new process"
            )
        yield ray


def _set_up_private_cluster(folder: Path) -> None:
    """Set what Ray reads when it is imported, for itself and the processes it starts.

    Args:
      folder: readable by this user alone; for the token, which is never in an
        environment variable or on a command line.
    """
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(_TOKEN_BYTES), encoding="ascii")
    os.environ.pop("RAY_AUTH_TOKEN", None)
    os.environ.update(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH=str(token),
        # On any system this makes Ray use the loopback address.
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        RAY_USAGE_STATS_ENABLED="0",
    )


def _require_token_mode(*, insecure: bool) -> None:
    mode = os.environ.setdefault("RAY_AUTH_MODE", "disabled" if insecure else "token")
    if mode != "token" and not insecure:
        raise ValueError(
            f"--cluster: RAY_AUTH_MODE is {mode!r}, so anybody who connects to the "
            "cluster can run code on it. Start it with RAY_AUTH_MODE=token, and set "
            "that here too, or give --insecure on a private network"
        )


def import_ray() -> Any:
    """Import Ray, once its settings are made.

    Raises:
      ModuleNotFoundError: if it is not installed.
    """
    return import_extra("ray", "`jaxpar launch ray`")
