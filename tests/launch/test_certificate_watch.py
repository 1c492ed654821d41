"""Is the end of certificates told while a run goes on, and does that never end it?"""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxpar.launch import certificate_watch
from jaxpar.launch.certificate_watch import CertificateWatch, ended_certificates
from jaxpar.launch.certificates import make_certificates
from jaxpar.launch.security import read_tls
from jaxpar.launch.start import Launch
from jaxpar.launch.stop_signals import STOPPING
from jaxpar.launch.supervisor import supervise
from jaxpar.launch.worker_environment import Tls
from tests.launch.clock import set_clock


@pytest.fixture
def tls(tmp_path: Path) -> Tls:
    """Of a folder that was copied: the authority's key is elsewhere."""
    (made,) = make_certificates(tmp_path / "certs", ["node1"], days=30)
    folder = shutil.copytree(made, tmp_path / "copied" / "node1")
    return read_tls(folder)


@pytest.fixture
def own_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOPPING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_each_day_tells_of_certificates_that_end(
    tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(certificate_watch.time, "monotonic", lambda: now)
    said: list[str] = []
    watch = CertificateWatch(tls, said.append)
    for day, word in ((10, ""), (25, "end on 20"), (31, "next start will be refused")):
        set_clock(monkeypatch, day)
        now += 86_400
        for _ in range(3):
            watch.look()
        assert len(said) == bool(word), "once a day"
        assert not word or word in said.pop()
    Path(tls.certificate).unlink()
    now += 86_400
    watch.look()
    assert "can't be read" in said.pop()


def test_run_without_certificates_has_none_to_look_after() -> None:
    watch = CertificateWatch(None, pytest.fail)
    watch._next = 0.0
    watch.look()
    assert ended_certificates(None, pytest.fail) is None


def test_run_goes_on_after_the_end_of_its_certificates(
    tls: Tls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_signals: None
) -> None:
    """A real supervisor and its worker; days of a fifth of a second."""
    monkeypatch.setattr(certificate_watch, "_DAY_SECONDS", 0.2)
    set_clock(monkeypatch, 29)
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(1)\nopen('well', 'x')\n")
    monkeypatch.chdir(tmp_path)
    launch = Launch((str(script),), tmp_path / "run", tls=tls, restarts=0)
    assert supervise(launch) == 0
    assert (tmp_path / "well").exists()
    report = (tmp_path / "run" / "launch" / "report.txt").read_text()
    assert report.count("the certificates of --tls end on 20") >= 3, "start, and later"
