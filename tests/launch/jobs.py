"""Jobs for a cluster, and what a cluster would make of their manifests."""

import dataclasses
import re
from pathlib import Path

import pytest
import tyro

from jaxpar.cli.launch import Local
from jaxpar.launch.k8s import K8s, make_job_set
from jaxpar.launch.limits import Limits

ALONE = K8s(
    script=Path("/app/pretrain.py"), name="gpt", image="team/train:1", claim="runs"
)
SECURE = dataclasses.replace(
    ALONE,
    hosts=4,
    gpus=8,
    secret="gpt-certs",
    namespace="ml",
    mount=Path("/data"),
    out=Path("/data/runs/a"),
    port=8476,
    limits=Limits(rendezvous=1800.0),
    restarts=7,
    flags=("--lr", "1e-4", "--name", "a b", "--note", "$(POD_IP) costs $5"),
)
INSECURE = dataclasses.replace(ALONE, hosts=2, processes=3, insecure=True)
JOBS = {"alone": ALONE, "secure": SECURE, "insecure": INSECURE}

every_job = pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)


def job_spec(job: K8s) -> dict:
    """The indexed job."""
    (replicated,) = make_job_set(job)["spec"]["replicatedJobs"]
    assert (replicated["name"], replicated["replicas"]) == ("node", 1)
    return replicated["template"]["spec"]


def pod(job: K8s) -> dict:
    """The pods' spec."""
    return job_spec(job)["template"]["spec"]


def container(job: K8s) -> dict:
    """What is run, with what a cluster puts into it."""
    return pod(job)["containers"][0]


def in_cluster(text: str, index: int) -> str:
    """Text with variables put in as the kubelet does it."""
    values = {"JOB_COMPLETION_INDEX": str(index), "POD_IP": f"10.0.0.{index}"}

    def value(match: re.Match) -> str:
        return "$" if match[0] == "$$" else values.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)


def arguments(job: K8s, index: int) -> list[str]:
    """What a pod's ``jaxpar`` is given."""
    return [in_cluster(text, index) for text in container(job)["args"]]


def told(job: K8s, index: int) -> tuple[Local, list[str]]:
    """What a pod's supervisor makes of its arguments, and its script's flags."""
    found = arguments(job, index)
    assert found[:2] == ["launch", "local"]
    at = found.index("--") if "--" in found else len(found)
    return tyro.cli(Local, args=found[2:at]), found[at + 1 :]
