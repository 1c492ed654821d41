"""Does each worker of a host get its number, its GPUs and its files?"""

import dataclasses
from pathlib import Path

import pytest

from jaxpar.launch import start
from jaxpar.launch.limits import Limits
from jaxpar.launch.rendezvous import Attempt
from jaxpar.launch.start import Launch, host_gpus, workers_of
from jaxpar.launch.worker_environment import Tls

TLS = Tls("cert", "key", "ca")
LAUNCH = Launch(
    ("train.py",),
    Path("runs/a"),
    processes=2,
    host=1,
    hosts=3,
    address="10.0.0.1",
    gpus=(4, 5, 6, 7),
    tls=TLS,
    heartbeat_seconds=7,
)
ATTEMPT = Attempt(
    number=3,
    state="run",
    coordinator="10.0.0.0:99",
    members={0: "a", 1: "b", 2: "c"},
    processes={0: 3, 1: 2, 2: 4},
    planned=12,
)


def test_workers_are_numbered_after_those_of_earlier_hosts() -> None:
    workers = workers_of(LAUNCH, ATTEMPT)
    assert [worker.index for worker in workers] == [3, 4]
    assert {(w.processes, w.planned, w.attempt) for w in workers} == {(9, 12, 3)}
    assert {w.coordinator for w in workers} == {"10.0.0.0:99"}
    assert {(w.address, w.tls, w.heartbeat_seconds) for w in workers} == {
        ("10.0.0.1", TLS, 7)
    }
    assert {w.files for w in workers} == {"runs/a/launch/0003"}


def test_gpus_are_divided_evenly() -> None:
    assert [w.gpus for w in workers_of(LAUNCH, ATTEMPT)] == [(4, 5), (6, 7)]
    alone = dataclasses.replace(LAUNCH, gpus=())
    assert [w.gpus for w in workers_of(alone, ATTEMPT)] == [None, None]


@pytest.mark.parametrize(("limit", "seconds"), [(600.0, 450), (0.0, 2700)])
def test_worker_gives_up_before_its_limit_to_say_why(limit, seconds) -> None:
    launch = dataclasses.replace(LAUNCH, limits=Limits(start=limit))
    assert {w.start_seconds for w in workers_of(launch, ATTEMPT)} == {seconds}


def test_gpus_of_the_host_are_its_numbered_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "_DEVICES", tmp_path)
    assert host_gpus() == ()
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "nvidia0", "tty1"):
        (tmp_path / name).touch()
    assert host_gpus() == (0, 2, 10)
