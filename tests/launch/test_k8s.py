"""Does the manifest start what was asked for, and would a cluster take it?

No cluster is here: the JobSet is compared with the models that Kubeflow Trainer
publishes of JobSet's and Kubernetes' API, and what a cluster would do with commands,
variables and exit codes is done by hand.
"""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.launch import k8s_job
from jaxpar.launch.exit_codes import DIVERGED, FINAL, GAVE_UP, STOPPED
from jaxpar.launch.k8s import K8s, commands, make_job_set, manifest, write_manifest
from jaxpar.launch.security import read_tls
from jaxpar.launch.worker_environment import Tls
from tests.launch.jobs import (
    ALONE,
    JOBS,
    SECURE,
    container,
    every_job,
    in_cluster,
    job_spec,
    pod,
    told,
)

ROOT = Path(__file__).resolve().parents[2]


def by_model(made: dict) -> dict:
    """An object as its published model reads it: without what that does not know."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    return models.JobsetV1alpha2JobSet.from_dict(made).to_dict()


@every_job
def test_published_model_knows_all_of_the_manifest(job):
    made = json.loads(manifest(job))
    assert made == make_job_set(job)
    assert by_model(made) == made


@pytest.mark.parametrize(
    ("job", "at", "field"),
    [
        (SECURE, (), "replicas"),
        (SECURE, ("spec", "network"), "enableDnsHostnames"),
    ],
)
def test_published_models_know_no_other_field(job, at, field):
    place = made = make_job_set(job)
    for part in at:
        place = place[part]
    place[field] = 1
    assert by_model(made) != made


@every_job
def test_each_host_is_a_pod(job):
    spec = job_spec(job)
    assert (spec["completions"], spec["parallelism"]) == (job.hosts, job.hosts)
    assert spec["completionMode"] == "Indexed"


@pytest.mark.parametrize(
    ("code", "is_taken_away", "action"),
    [
        *((code, False, "FailJob") for code in FINAL),
        (STOPPED, False, "Ignore"),
        (STOPPED, True, "Ignore"),
        (137, True, "Ignore"),
        (DIVERGED, True, "FailJob"),
        (GAVE_UP, False, None),
        (1, False, None),
        (137, False, None),
    ],
)
def test_exit_code_decides_what_happens(code, is_taken_away, action):
    """None is Kubernetes' own rule, and backoffLimit 0: the job fails."""
    spec = job_spec(SECURE)

    def fits(rule: dict) -> bool:
        if "onExitCodes" in rule:
            wanted = rule["onExitCodes"]
            assert (wanted["containerName"], wanted["operator"]) == ("node", "In")
            assert wanted["values"] == sorted(set(wanted["values"]) - {0})
            return code in wanted["values"]
        assert rule["onPodConditions"] == [
            {"type": "DisruptionTarget", "status": "True"}
        ]
        return is_taken_away

    rules = spec["podFailurePolicy"]["rules"]
    assert next((rule["action"] for rule in rules if fits(rule)), None) == action
    assert (spec["backoffLimit"], spec["podReplacementPolicy"]) == (0, "Failed")
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_job_that_failed_by_a_code_is_not_started_again():
    job = dataclasses.replace(SECURE, job_restarts=5)
    policy = make_job_set(job)["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 5
    (rule,) = policy["rules"]
    assert rule["action"] == "FailJobSet"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]


FAKE_KUBECTL = """
kubectl() {
  for word in "$@"; do
    case $word in --from-file=*)
      word=${word#--from-file=}
      cp "${word#*=}" "$SECRET/${word%%=*}" && chmod 440 "$SECRET/${word%%=*}" ;;
    esac
  done
}
jaxpar() { "$PYTHON" -m jaxpar "$@"; }
set -e
"""


@pytest.mark.parametrize(("hosts", "secrets"), [(2, 1), (3, 2)])
def test_secrets_made_as_told_give_each_pod_its_own_certificates(
    hosts, secrets, tmp_path, monkeypatch
):
    """The printed commands and the container's own shell, with kubectl faked.

    The volume has the files of all secrets, here of two hosts each.
    """
    x509 = pytest.importorskip("cryptography.x509")
    monkeypatch.setattr(k8s_job, "HOSTS_IN_SECRET", 2)
    secret, certs = tmp_path / "secret", tmp_path / "own"
    secret.mkdir()
    job = dataclasses.replace(SECURE, hosts=hosts)
    lines = commands(job)
    (volume,) = [each for each in pod(job)["volumes"] if each["name"] == "secret"]
    sources = [each["secret"]["name"] for each in volume["projected"]["sources"]]
    assert sources == re.findall(r"secret generic (\S+)", "\n".join(lines))
    assert len(sources) == secrets
    assert lines[0].startswith("Once")
    assert lines[-1] == "To start: kubectl apply -f FILE"
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "SECRET": str(secret),
    }
    subprocess.run(
        ["bash", "-c", FAKE_KUBECTL + "\n".join(lines[1:-1])],
        check=True,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    for index in range(hosts):
        certs.mkdir(exist_ok=True)
        mounted = mount_of_secret(job, index, secret, tmp_path / f"pod{index}")
        keys = [path.read_bytes() for path in mounted.rglob("*key.pem")]
        assert keys == [Path(secret, f"{index}.key.pem").read_bytes()], "its own alone"
        command = [
            in_cluster(text, index)
            .replace("/run/jaxpar/secret", str(mounted))
            .replace("/run/jaxpar/certs", str(certs))
            for text in container(job)["command"]
        ]
        assert command[-1] == "jaxpar"
        shown = subprocess.check_output([*command[:-1], "echo", "a b"], text=True)
        assert shown == "a b\n"
        tls = read_tls(certs)
        assert isinstance(tls, Tls)
        found = x509.load_pem_x509_certificate(Path(tls.certificate).read_bytes())
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        assert names.value.get_values_for_type(x509.DNSName) == [
            told(job, index)[0].address
        ]


def mount_of_secret(job: K8s, index: int, secret: Path, to: Path) -> Path:
    """What a pod sees of the secret: as the kubelet mounts it, by copies."""
    (only,) = pod(job)["containers"]
    for mount in only["volumeMounts"]:
        if mount["name"] != "secret":
            continue
        name = in_cluster(mount.get("subPathExpr", "."), index)
        place = Path(f"{to}{mount['mountPath'].removeprefix('/run/jaxpar/secret')}")
        place.parent.mkdir(parents=True, exist_ok=True)
        source = secret / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, place)
    return to


def test_no_secret_is_in_the_manifest(tmp_path, monkeypatch):
    """Nor anything of what is around it: it would be read with the manifest."""
    monkeypatch.chdir(tmp_path)
    Path("gpt-certs").mkdir()
    for name in ("ca.pem", "cert.pem", "key.pem"):
        Path("gpt-certs", name).write_text("PRIVATE-PEM")
    monkeypatch.setenv("HF_TOKEN", "PRIVATE-TOKEN")
    for job in JOBS.values():
        text = manifest(job)
        assert "PRIVATE" not in text
        assert str(tmp_path) not in text
        assert json.loads(text)["kind"] == "JobSet"


def test_manifest_is_written_to_its_file_or_printed(tmp_path, capsys):
    job = dataclasses.replace(ALONE, file=tmp_path / "gpt.json")
    write_manifest(job)
    assert job.file.read_text() == manifest(job)
    assert capsys.readouterr().out == f"To start: kubectl apply -f {job.file}\n"
    write_manifest(ALONE)
    printed = capsys.readouterr()
    assert printed.out == manifest(ALONE), "to be piped into kubectl"
    assert printed.err == "To start: kubectl apply -f FILE\n"


def test_missing_folder_of_the_file_is_named(tmp_path):
    job = dataclasses.replace(ALONE, file=tmp_path / "missing" / "gpt.json")
    with pytest.raises(FileNotFoundError, match=r"--file .*make it first"):
        write_manifest(job)
