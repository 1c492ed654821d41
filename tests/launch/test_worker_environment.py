"""Does a worker get what its launcher meant, and does a wrong contract say so?"""

import dataclasses

import pytest

from jaxpar.launch.worker_environment import VARIABLE, Tls, Worker, current

WORKER = Worker(
    coordinator="127.0.0.1:1234",
    processes=4,
    index=3,
    planned=8,
    address="127.0.0.1",
    local_devices=2,
    gpus=(4, 5),
    tls=Tls("cert.pem", "key.pem", "ca.pem"),
    folder="runs/a",
    attempt=2,
    files="runs/a/launch/0002",
)


@pytest.mark.parametrize(
    "worker", [WORKER, dataclasses.replace(WORKER, gpus=None, tls=None)]
)
def test_contract_survives_the_environment(worker: Worker) -> None:
    assert current(worker.environment()) == worker


def test_no_launcher_no_contract() -> None:
    assert current({}) is None


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"tls": null, "gpus": null}'])
def test_what_is_no_contract_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=f"{VARIABLE} is not a worker environment"):
        current({VARIABLE: text})


def test_files_of_workers_differ() -> None:
    other = dataclasses.replace(WORKER, index=2)
    names = {WORKER.heartbeat, WORKER.stacks, WORKER.error, WORKER.log}
    assert len(names | {other.heartbeat, other.stacks, other.error, other.log}) == 8
