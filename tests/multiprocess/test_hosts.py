"""Do hosts that only a network joins train together, over TLS, and survive its cut?

Two network namespaces of this machine, with a switch between them. They see one disk,
as the hosts of a cluster see one file system.
"""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from benchmarks.network.hosts import Network, NetworkError
from jaxpar.launch.certificates import make_certificates
from jaxpar.launch.exit_codes import GAVE_UP
from tests.multiprocess.launching import Launched, command, run_to_the_end
from tests.multiprocess.test_launch import assert_same_end

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        made = Network(2)
    except NetworkError as error:
        pytest.skip(str(error))
    with made:
        yield made


class OnHost(Launched):
    """The launcher of one host."""

    def __init__(self, network: Network, host: int, out: Path, *options: str):
        own = ("--hosts=2", f"--host={host}", f"--address={network.addresses[host]}")
        args = command(out, of_launch=(*own, *options))
        super().__init__(out, network.command(host, args))


needs_tls = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason="TLS came with jax 0.11.2"
)


@needs_tls
def test_run_over_tls_survives_a_partition(network: Network, tmp_path: Path) -> None:
    """The cable is pulled during training; the run goes on when it is back."""
    out = tmp_path / "run"
    folders = make_certificates(tmp_path / "certs", network.addresses)
    options = [
        (f"--tls={folder}", "--heartbeat=10", "--limits.step=15") for folder in folders
    ]
    with (
        OnHost(network, 0, out, *options[0]) as first,
        OnHost(network, 1, out, *options[1]) as second,
    ):
        first.wait_for_step(6)
        network.plug(1, "down")
        first.until(lambda: first.attempt() == 2, "a second attempt")
        network.plug(1, "up")
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
    network: Network, tmp_path: Path
) -> None:
    """Host 0 has certificates, host 1 comes without."""
    out = tmp_path / "run"
    (folder, _) = make_certificates(tmp_path / "certs", network.addresses)
    limits = ("--limits.start=20", "--limits.rendezvous=30", "--restarts=0")
    with (
        OnHost(network, 0, out, f"--tls={folder}", *limits) as first,
        OnHost(network, 1, out, "--insecure", *limits) as second,
    ):
        assert first.code() == GAVE_UP, first.output()
        assert second.code() == GAVE_UP, second.output()
    assert not (out / "checkpoints").exists()
    told = first.output()
    assert "worker 0" in told
    assert "reached 10.78.0.1:" in told
    assert "certificates of one authority (--tls), or none" in told


def test_address_of_others_needs_certificates(tmp_path: Path) -> None:
    args = command(tmp_path / "run", of_launch=("--address=10.78.0.1",))
    with Launched(tmp_path / "run", args) as launched:
        assert launched.code() == 2
        told = launched.output()
    assert "--address 10.78.0.1: others can reach it" in told
    assert "jaxpar launch certs" in told
