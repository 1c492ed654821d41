"""Is the coordinator of workers on one host closed to the host's other users?"""

import dataclasses
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import pytest

from jaxpar.cli.launch import Local, make_launch
from jaxpar.launch import security
from jaxpar.launch.rendezvous import Attempt
from jaxpar.launch.security import own_certificates
from jaxpar.launch.start import Launch, workers_of

ROOT = Path(__file__).resolve().parents[2]
needs_tls = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason="TLS came with jax 0.11.2"
)


@pytest.mark.parametrize(
    ("flags", "makes"),
    [
        ({}, True),
        ({"address": "::1"}, True),
        ({"insecure": True}, False),
        ({"address": "node1", "insecure": True}, False),
    ],
)
def test_workers_of_one_host_have_tls_unless_it_is_refused(flags, makes, tmp_path):
    script = tmp_path / "x.py"
    script.touch()
    launch = make_launch(Local(script=script, **flags), host=0, hosts=1)
    assert (launch.own_tls, launch.tls) == (makes, None)


@needs_tls
def test_certificates_are_private_and_end_with_their_attempt(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    launch = Launch(("x.py",), tmp_path / "run", processes=2, own_tls=True)
    with own_certificates("127.0.0.1", print) as folder:
        assert folder is not None
        assert stat.S_IMODE(Path(folder).parent.stat().st_mode) == 0o700
        attempt = Attempt(1, "run", "127.0.0.1:1", {0: "a"}, {0: 2}, 2, tls=folder)
        for worker in workers_of(launch, attempt):
            assert worker.tls is not None
            for path in dataclasses.astuple(worker.tls):
                assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert not list(tmp_path.iterdir())


def test_older_jax_has_none(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(security.metadata, "version", lambda _: "0.10.2")
    with own_certificates("127.0.0.1", print) as folder:
        assert folder is None


@needs_tls
def test_disk_that_takes_none_does_not_end_a_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with own_certificates("127.0.0.1", print) as folder:
        assert folder is None
    said = capsys.readouterr().out
    assert "other users of this host can connect to the coordinator" in said
    assert "TMPDIR" in said


@needs_tls
@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "answers"),
    [
        (("--insecure",), True),
        (("--address=127.0.0.1",), False),
        (("--address=::1",), False),
        (("--address=localhost",), False),
    ],
)
def test_stranger_on_the_host_is_refused(flags, answers, tmp_path: Path) -> None:
    """A process that is not of the launcher, and has the coordinator's address."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    launch = [sys.executable, "-m", "jaxpar", "launch", "local", "--processes=2"]
    own = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "TMPDIR": str(tmp_path)}
    ran = subprocess.run(
        [*launch, *flags, f"--out={tmp_path / 'run'}", str(script)],
        cwd=ROOT,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ("stranger: answered" in ran.stdout) == answers, ran.stdout
    assert ("UNAVAILABLE" in ran.stdout) != answers, ran.stdout
    assert not list(tmp_path.glob("jaxpar-tls-*"))


TRAIN = """
import subprocess, sys
from jaxpar.launch.agreement import exchange
from jaxpar.launch.worker_environment import current

STRANGER = '''
import sys
from jax._src.lib import _jax
client = _jax.get_distributed_runtime_client(sys.argv[1], 0, init_timeout=4)
client.blocking_key_value_get("jaxpar/x/1/1", 4000)
'''
exchange("x", "mine")
if current().index == 0:
    command = [sys.executable, "-c", STRANGER, current().coordinator]
    said = subprocess.run(command, capture_output=True, text=True)
    answered = "service incarnation" in said.stderr  # It must ask once more, with it.
    print("stranger:", "answered" if answered else "refused", said.stderr[:600])
exchange("y", "mine")
"""
