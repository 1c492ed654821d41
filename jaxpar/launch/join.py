"""How does a worker join its group, or report why it can't?"""

import os
import socket
import stat
import time
from pathlib import Path
from typing import Any

import jax
import psutil

from jaxpar.launch.gloo import listen_on
from jaxpar.launch.own_files import retried
from jaxpar.launch.worker_environment import Worker, say_error

_TRY_SECONDS = 0.2


class JoinError(OSError):
    """A worker did not find the others; the message says what to look at."""


def join(worker: Worker) -> None:
    """Find the other workers; call it before anything else in JAX.

    Args:
      worker: this worker. A single worker joins nobody.

    Raises:
      JoinError: if the coordinator can't be reached, or its port is in use.
      ValueError: if certificates are given and this jax can't use them; if it is one of
        several workers and has no coordinator.
    """
    if worker.coordinator is None:
        if worker.processes > 1:
            raise ValueError(
                f"worker {worker.index} is one of {worker.processes} and has no "
                "coordinator: each would train the whole run by itself. Start workers "
                "with `jaxpar launch`, which sets the coordinator"
            )
        return
    host, _, port = worker.coordinator.rpartition(":")
    if worker.index == 0:
        _require_free(host, int(port))
    else:
        _wait_for(worker, host, int(port))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # If it finds nobody, JAX ends the process at once: this message is what remains.
    say_error(worker, _not_found(worker))
    jax.distributed.initialize(
        worker.coordinator,
        num_processes=worker.processes,
        process_id=worker.index,
        local_device_ids=worker.gpus,
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, int(_remaining_seconds(worker))),
        heartbeat_timeout_seconds=worker.heartbeat_seconds,
        # By default it listens on every address of the host.
        coordinator_bind_address=worker.coordinator,
        **_tls_options(worker),
    )
    retried(lambda: worker.error.unlink(missing_ok=True), worker.error)
    listen_on(worker.address)


def _not_found(worker: Worker) -> str:
    how = "without certificates" if worker.tls is None else "over TLS"
    return (
        f"worker {worker.index} ({socket.gethostname()}) reached {worker.coordinator} "
        f"{how}, but not all of {worker.processes} workers connected within "
        f"{worker.start_seconds} s. Check that a launcher runs on every host, and "
        "that all of them have certificates of one authority (--tls), or none"
    )


def _remaining_seconds(worker: Worker) -> float:
    """Time left to find the others; imports have used some of it."""
    taken = time.time() - psutil.Process().create_time()
    return worker.start_seconds - taken


def _tls_options(worker: Worker) -> dict[str, Any]:
    if worker.tls is None:
        return {}
    if jax.__version_info__ < (0, 11, 2):
        raise ValueError(
            f"jax {jax.__version__} has no TLS between workers: install jax 0.11.2 or "
            "newer, or launch with --insecure on a private network"
        )
    return {
        "mtls_cert_file": worker.tls.certificate,
        "mtls_key_file": worker.tls.key,
        "mtls_ca_file": worker.tls.authority,
        "verify_secure_credentials": True,
    }


def _require_free(host: str, port: int) -> None:
    """Reject a port that is in use, before JAX ends the process for it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host.strip("[]"), port))
        except OSError as error:
            raise JoinError(
                f"worker 0 can't listen on {host}:{port} ({error.strerror})"
                f"{listener(port)}: choose another --port, or leave it out"
            ) from error


def listener(port: int) -> str:
    """The process that listens on a port, as text; empty if it can't be found."""
    try:
        for each in psutil.net_connections("tcp"):
            if each.laddr and each.laddr.port == port and each.pid:
                return f": process {each.pid} ({psutil.Process(each.pid).name()}) does"
    except psutil.Error:
        return ""
    return ""


def _wait_for(worker: Worker, host: str, port: int) -> None:
    """Wait until the coordinator listens."""
    until = time.monotonic() + _remaining_seconds(worker)
    reason = "no answer"
    while time.monotonic() < until:
        try:
            with socket.create_connection((host.strip("[]"), port), timeout=5):
                return
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(_TRY_SECONDS)
    raise JoinError(
        f"worker {worker.index} ({socket.gethostname()}) did not reach the coordinator "
        f"at {worker.coordinator} within {worker.start_seconds} s ({reason}). Check "
        "that host 0 runs, that its address can be reached from here, and "
        "that no firewall closes the port"
    )


def use_private_cache(folder: Path | None = None) -> None:
    """Store compiled programs in a folder that this user alone can write in.

    Its content is executed. A folder that was set is checked like the default one;
    whoever may write in a bucket is its owner's to say.

    Args:
      folder: made if missing; None for jaxpar's in the user's cache. One that was set
        before (JAX_COMPILATION_CACHE_DIR) is used instead.

    Raises:
      PermissionError: if others may write in it, or another user owns it.
    """
    preset = jax.config.jax_compilation_cache_dir
    if preset and "://" in preset:
        return
    if preset:
        folder = Path(preset)
    elif folder is None:
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        folder = Path(home, "jaxpar", "compiled").expanduser()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.lstat()
    own = "JAX_COMPILATION_CACHE_DIR" if preset else "the compilation cache"
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(
            f"{own} {str(folder)!r} is another user's, or a link: move it away, or set "
            "another (JAX_COMPILATION_CACHE_DIR)"
        )
    if status.st_mode & 0o022:
        raise PermissionError(
            f"{own} {str(folder)!r} can be written by others, who could have their "
            f"programs run (mode {status.st_mode & 0o7777:o}): chmod 700 it, or set "
            "another (JAX_COMPILATION_CACHE_DIR)"
        )
    if not preset:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
