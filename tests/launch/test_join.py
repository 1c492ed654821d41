"""Does a worker find the others, or say what to look at; and whose is the cache?"""

import dataclasses
import os
import socket
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxpar.launch import join as joining
from jaxpar.launch.join import JoinError, join, listener, use_private_cache
from tests.launch.test_worker_environment import WORKER


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What JAX is given, instead of joining."""
    found: dict[str, Any] = {}

    def initialize(coordinator: str, **options: Any) -> None:
        found.update(options, coordinator=coordinator)

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(jax.config, "update", found.__setitem__)
    monkeypatch.setattr(
        joining, "listen_on", lambda address: found.update(listens_on=address)
    )
    return found


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def first_worker(files: Path, **change: Any) -> Any:
    """Worker 0, which need not wait for itself to listen."""
    right = {"index": 0, "files": str(files), "start_seconds": 10**6}
    coordinator = f"127.0.0.1:{free_port()}"
    return dataclasses.replace(WORKER, coordinator=coordinator, **(right | change))


def test_single_worker_joins_nobody(given: dict) -> None:
    join(dataclasses.replace(WORKER, coordinator=None, processes=1, index=0))
    assert not given


def test_one_of_several_without_a_coordinator_is_refused(given: dict) -> None:
    with pytest.raises(ValueError, match="worker 3 is one of 4 and has no coordinator"):
        join(dataclasses.replace(WORKER, coordinator=None))
    assert not given


def test_worker_joins_by_what_its_launcher_gave_it(given: dict, tmp_path: Path) -> None:
    worker = first_worker(tmp_path)
    join(worker)
    assert (given["coordinator"], given["coordinator_bind_address"]) == (
        worker.coordinator,
        worker.coordinator,
    )
    assert (given["num_processes"], given["process_id"]) == (4, 0)
    assert given["local_device_ids"] == (4, 5)
    assert given["listens_on"] == "127.0.0.1"
    assert given["jax_cpu_collectives_implementation"] == "gloo"
    files = [given[f"mtls_{name}_file"] for name in ("cert", "key", "ca")]
    assert files == ["cert.pem", "key.pem", "ca.pem"]
    assert given["verify_secure_credentials"] is True
    assert not worker.error.exists(), "it is not lost"


def test_worker_without_certificates_asks_for_no_tls(
    given: dict, tmp_path: Path
) -> None:
    join(first_worker(tmp_path, tls=None))
    assert not [name for name in given if "mtls" in name or "secure" in name]


def test_worker_whose_jax_ends_the_process_has_left_its_reason(
    given: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def end(*_: Any, **__: Any) -> None:
        raise SystemExit(1)

    monkeypatch.setattr(jax.distributed, "initialize", end)
    worker = first_worker(tmp_path)
    with pytest.raises(SystemExit):
        join(worker)
    told = worker.error.read_text()
    assert f"reached {worker.coordinator} over TLS, but not all of 4 workers" in told
    assert not given.keys() & {"listens_on"}


def test_certificates_need_a_jax_that_takes_them(
    given: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    with pytest.raises(ValueError, match=r"no TLS between workers: install jax 0\.11"):
        join(first_worker(tmp_path))


def test_port_in_use_is_told_with_its_process(given: dict, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"process {os.getpid()} (" in listener(port)
        worker = dataclasses.replace(
            first_worker(tmp_path), coordinator=f"127.0.0.1:{port}"
        )
        told = rf"can't listen on 127\.0\.0\.1:{port} \(Address already in use\)"
        with pytest.raises(JoinError, match=rf"{told}.*process {os.getpid()} .*--port"):
            join(worker)
    assert listener(port) == ""


def test_coordinator_that_cant_be_reached_is_told_with_what_to_check() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # This process has run for longer than a worker may look for the others.
    alone = dataclasses.replace(
        WORKER, coordinator=f"127.0.0.1:{port}", start_seconds=0
    )
    told = rf"did not reach the coordinator at 127.0.0.1:{port} within 0 s.*firewall"
    with pytest.raises(JoinError, match=told):
        join(alone)


def test_cache_of_compiled_programs_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to = {}
    monkeypatch.setattr(jax.config, "update", set_to.__setitem__)
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setattr(type(jax.config), "jax_compilation_cache_dir", None)
    folder = tmp_path / "cache"
    use_private_cache(folder)
    assert set_to["jax_compilation_cache_dir"] == str(folder) != before
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="can be written by others"):
        use_private_cache(folder)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(PermissionError, match="another user's, or a link"):
        use_private_cache(tmp_path / "link")
    assert os.getuid() == folder.stat().st_uid


def test_cache_that_was_set_is_private_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By JAX_COMPILATION_CACHE_DIR: what is in it is executed as well."""
    set_to: dict[str, Any] = {}
    monkeypatch.setattr(jax.config, "update", set_to.__setitem__)

    def preset(folder: str | Path) -> None:
        value = str(folder)
        monkeypatch.setattr(type(jax.config), "jax_compilation_cache_dir", value)
        use_private_cache()

    folder = tmp_path / "cache"
    preset(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    for mode in (0o770, 0o707, 0o1777):
        folder.chmod(mode)
        told = r"JAX_COMPILATION_CACHE_DIR.*can be written by others.*chmod 700"
        with pytest.raises(PermissionError, match=told):
            preset(folder)
    folder.chmod(0o755)
    preset(folder)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(PermissionError, match="another user's, or a link"):
        preset(tmp_path / "link")
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="another user's, or a link"):
        preset(folder)
    preset("gs://bucket/cache")
    assert not set_to, "what was set stays"
