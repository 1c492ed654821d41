"""Do hosts that only a network joins train together, over TLS, and survive its cut?

Two network namespaces of this machine, with a cable between them. They see one disk, as
the hosts of a cluster see one file system.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from jaxpar.launch.certificates import make_certificates
from jaxpar.launch.exit_codes import GAVE_UP
from tests.multiprocess.launching import Launched, command, run_to_the_end
from tests.multiprocess.test_launch import assert_same_end

ADDRESSES = ("10.77.0.1", "10.77.0.2")

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need root and iproute2",
    ),
]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Cable:
    """Two namespaces, and what joins them."""

    def __init__(self):
        self.spaces = [f"jaxpar{os.getpid()}-{i}" for i in range(2)]
        ends = [f"jp{os.getpid()}-{i}" for i in range(2)]
        for space in self.spaces:
            ip("netns", "add", space)
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for space, end, address in zip(self.spaces, ends, ADDRESSES, strict=True):
            ip("link", "set", end, "netns", space)
            ip("-n", space, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", space, "link", "set", end, "up")
            ip("-n", space, "link", "set", "lo", "up")
        self.end = ends[1]

    def set(self, state: str) -> None:
        """Plug it in or pull it out: "up" or "down"."""
        ip("-n", self.spaces[1], "link", "set", self.end, state)

    def close(self) -> None:
        for space in self.spaces:
            ip("netns", "del", space)


@pytest.fixture
def cable() -> Iterator[Cable]:
    cable = Cable()
    yield cable
    cable.close()


class OnHost(Launched):
    """The launcher of one host."""

    def __init__(self, cable: Cable, host: int, out: Path, *options: str):
        own = ("--hosts=2", f"--host={host}", f"--address={ADDRESSES[host]}", *options)
        args = command(out, of_launch=own)
        super().__init__(out, ["ip", "netns", "exec", cable.spaces[host], *args])


needs_tls = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason="TLS came with jax 0.11.2"
)


@needs_tls
def test_run_over_tls_survives_a_partition(cable: Cable, tmp_path: Path) -> None:
    """The cable is pulled during training; the run goes on when it is back."""
    out = tmp_path / "run"
    folders = make_certificates(tmp_path / "certs", ADDRESSES)
    options = [
        (f"--tls={folder}", "--heartbeat=10", "--limits.step=15") for folder in folders
    ]
    with (
        OnHost(cable, 0, out, *options[0]) as first,
        OnHost(cable, 1, out, *options[1]) as second,
    ):
        first.wait_for_step(6)
        cable.set("down")
        first.until(lambda: first.attempt() == 2, "a second attempt")
        cable.set("up")
        assert (first.code(), second.code()) == (0, 0), first.output() + second.output()
    report = first.report()
    assert "host 0: " in report
    assert "host 1: " in report
    assert "attempt 2" in report
    whole = tmp_path / "whole"
    run_to_the_end(whole, processes=2)
    assert_same_end(out, whole)
    keys = [(folder / "key.pem").read_text() for folder in folders]
    for file in out.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert not any(key.split("\n")[1].encode() in content for key in keys)


@needs_tls
def test_connection_without_certificates_is_refused(
    cable: Cable, tmp_path: Path
) -> None:
    """Host 0 has certificates, host 1 comes without."""
    out = tmp_path / "run"
    (folder, _) = make_certificates(tmp_path / "certs", ADDRESSES)
    limits = ("--limits.start=20", "--limits.rendezvous=30", "--restarts=0")
    with (
        OnHost(cable, 0, out, f"--tls={folder}", *limits) as first,
        OnHost(cable, 1, out, "--insecure", *limits) as second,
    ):
        assert first.code() == GAVE_UP, first.output()
        assert second.code() == GAVE_UP, second.output()
    assert not (out / "checkpoints").exists()
    told = first.output()
    assert "worker 0" in told
    assert "reached 10.77.0.1:" in told
    assert "certificates of one authority (--tls), or none" in told


def test_address_of_others_needs_certificates(tmp_path: Path) -> None:
    args = command(tmp_path / "run", of_launch=("--address=10.77.0.1",))
    with Launched(tmp_path / "run", args) as launched:
        assert launched.code() == 2
        told = launched.output()
    assert "--address 10.77.0.1: others can reach it" in told
    assert "jaxpar launch certs" in told
