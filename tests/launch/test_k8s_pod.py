"""Does a pod start what was asked for, with what it mounts, and may it do no more?"""

import re
from pathlib import Path

from jaxpar.cli.launch import Local
from jaxpar.launch import watchdog
from jaxpar.launch.k8s_pod import make_pod, secret_key
from jaxpar.launch.limits import Limits
from jaxpar.launch.security import require_secure
from tests.launch.jobs import (
    ALONE,
    INSECURE,
    SECURE,
    arguments,
    container,
    every_job,
    pod,
    told,
)


def test_supervisor_is_told_what_was_asked_for():
    local, flags = told(SECURE, 3)
    assert local == Local(
        script=Path("/app/pretrain.py"),
        out=Path("/data/runs/a"),
        hosts=4,
        host=3,
        processes=8,
        gpus=tuple(range(8)),
        address="gpt-node-0-3.gpt.ml.svc.cluster.local",
        port=8476,
        tls=Path("/run/jaxpar/certs"),
        limits=Limits(rendezvous=1800.0),
        restarts=7,
    )
    assert flags == list(SECURE.flags)


def test_insecure_hosts_are_reached_by_their_own_address():
    local, flags = told(INSECURE, 1)
    assert (local.address, local.insecure, local.tls) == ("10.0.0.1", True, None)
    assert (local.hosts, local.host, local.processes) == (2, 1, 3)
    assert (local.out, local.gpus, flags) == (Path("/runs/gpt"), (), [])


def test_single_host_listens_to_itself_alone():
    local, _ = told(ALONE, 0)
    require_secure(local.address, None, insecure=local.insecure)
    assert not local.insecure


@every_job
def test_variables_are_given_before_they_are_used(job):
    given = container(job)["env"]
    fields = {
        each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"]
        for each in given
        if "valueFrom" in each
    }
    assert fields == {
        "JOB_COMPLETION_INDEX": "metadata.annotations"
        "['batch.kubernetes.io/job-completion-index']",
        "POD_IP": "status.podIP",
    }
    words = [*container(job)["command"], *arguments(job, 0)[:-1]]
    used = re.findall(r"(?<!\$)\$\((\w+)\)", " ".join(words))
    assert set(used) <= set(fields)


@every_job
def test_pod_has_no_privileges_and_time_to_save(job):
    spec = pod(job)
    (only,) = spec["containers"]
    assert only["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    context = spec["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] == context["fsGroup"] == 1000
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["terminationGracePeriodSeconds"] > watchdog._SAVING_SECONDS
    assert spec["automountServiceAccountToken"] is False


@every_job
def test_pod_has_the_volumes_that_it_mounts(job):
    spec = pod(job)
    sources = {each.pop("name"): each for each in spec["volumes"]}
    (only,) = spec["containers"]
    mounts = {each["name"]: each["mountPath"] for each in only["volumeMounts"]}
    assert set(sources) == set(mounts)
    assert sources["runs"] == {"persistentVolumeClaim": {"claimName": "runs"}}
    assert mounts["runs"] == str(job.mount)
    home = {"name": "HOME", "value": mounts["home"]}
    assert home in container(job)["env"]
    assert sources["home"] == {"emptyDir": {}}
    if job.gpus:
        assert sources["shm"] == {"emptyDir": {"medium": "Memory"}}
        assert mounts["shm"] == "/dev/shm"
        limits = container(job)["resources"]["limits"]
        assert limits == {"nvidia.com/gpu": job.gpus}
    else:
        assert "shm" not in sources
        assert not container(job).get("resources")
    assert ("secret" in sources) == (job.secret is not None)


def test_secret_has_a_key_for_each_host_and_one_authority():
    assert secret_key("ca.pem", 3) == "ca.pem"
    assert secret_key("key.pem", 3) == "3.key.pem"
    assert secret_key("cert.pem", "$(INDEX)") == "$(INDEX).cert.pem"


def test_container_that_is_given_elsewhere_stays_empty():
    """Its name, rights and volumes are the pod's."""
    (only,) = make_pod(SECURE, {})["containers"]
    assert set(only) == {"name", "securityContext", "volumeMounts"}
    (full,) = make_pod(SECURE, {"image": "x"})["containers"]
    assert full == {**only, "image": "x"}
