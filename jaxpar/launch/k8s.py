"""How does a run start in a Kubernetes cluster: by a JobSet, which kubectl applies.

Each host is a pod of one indexed job, with one supervisor (`jaxpar launch local`).
Supervisors find each other in the run's folder, on a volume. A pod that is taken away
is replaced; an exit code that a restart would not mend ends the job.
"""

import json
import shlex
import sys
from typing import Any

from jaxpar.launch.exit_codes import FINAL, STOPPED
from jaxpar.launch.k8s_job import NODE, K8s, check
from jaxpar.launch.k8s_pod import make_container, make_pod, secret_key
from jaxpar.launch.security import AUTHORITY, CERTIFICATE, KEY


def write_manifest(job: K8s) -> None:
    """Write the manifest to the job's file, or print it; print the commands to run.

    The commands go to standard error where the manifest goes to standard output, so
    that ``jaxpar launch k8s ... | kubectl apply -f -`` works.

    Raises:
      ValueError: if something can't be done; the message names the flag.
      FileNotFoundError: if the file's folder does not exist.
    """
    text = manifest(job)
    if job.file is None:
        print(text, end="")
        print("\n".join(commands(job)), file=sys.stderr)
        return
    if not job.file.absolute().parent.is_dir():
        raise FileNotFoundError(
            f"--file {job.file}: the folder {str(job.file.parent)!r} does not exist; "
            "make it first"
        )
    job.file.write_text(text, encoding="utf-8")
    print("\n".join(commands(job)))


def manifest(job: K8s) -> str:
    """Write the JobSet as JSON, which kubectl reads as it reads YAML.

    Raises:
      ValueError: if something can't be done; the message names the flag.
    """
    return json.dumps(make_job_set(job), indent=2) + "\n"


def make_job_set(job: K8s) -> dict[str, Any]:
    """Make the JobSet: the pods, and what happens when one fails.

    Args:
      job: what to start.

    Returns:
      The object, of JSON's types.

    Raises:
      ValueError: if something can't be done; the message names the flag.
    """
    check(job)
    final = {
        "name": "final",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    indexed = {
        "completionMode": "Indexed",
        "completions": job.hosts,
        "parallelism": job.hosts,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": _failure_rules()},
        "template": {"spec": make_pod(job, make_container(job))},
    }
    spec = {
        "network": {
            "enableDNSHostnames": True,
            "publishNotReadyAddresses": True,
            "subdomain": job.network,
        },
        "successPolicy": {"operator": "All"},
        "failurePolicy": {"maxRestarts": job.job_restarts, "rules": [final]},
        "replicatedJobs": [
            {"name": NODE, "replicas": 1, "template": {"spec": indexed}}
        ],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name, "namespace": job.namespace},
        "spec": spec,
    }


def _failure_rules() -> list[dict[str, Any]]:
    """What a pod's end means, by the first that fits; else all pods start again."""

    def by_code(action: str, codes: list[int]) -> dict[str, Any]:
        found = {"containerName": NODE, "operator": "In", "values": codes}
        return {"action": action, "onExitCodes": found}

    taken_away = {"type": "DisruptionTarget", "status": "True"}
    return [
        by_code("FailJob", sorted(FINAL)),
        # The pod alone is replaced.
        by_code("Ignore", [STOPPED]),
        {"action": "Ignore", "onPodConditions": [taken_away]},
    ]


def commands(job: K8s) -> list[str]:
    """The shell commands that make the secrets and start the run."""
    apply = f"To start: kubectl apply -f {shlex.quote(str(job.file or 'FILE'))}"
    if not job.secret:
        return [apply]
    hosts = f"$(seq 0 {job.hosts - 1})"
    lines = [
        "Once, before, where nobody else can read:",
        f"  host() {{ echo {job.address('$1')}; }}",
        f"  jaxpar launch certs $(for i in {hosts}; do host $i; done) --out certs",
    ]
    for name, indices in job.secrets.items():
        lines += _make_secret(job, name, indices)
    return [*lines, apply]


def _make_secret(job: K8s, name: str, hosts: range) -> list[str]:
    """The command for the secret of some hosts; the first one has the authority too."""
    own = f"{secret_key('$file', '$i')}=certs/$(host $i)/$file"
    authority = f"{secret_key(AUTHORITY, 0)}=certs/$(host 0)/{AUTHORITY}"
    return [
        f"  kubectl create secret generic {name} -n {job.namespace} \\",
        *([f"    --from-file={authority} \\"] if hosts.start == 0 else []),
        f"    $(for i in $(seq {hosts.start} {hosts.stop - 1}); do "
        f"for file in {CERTIFICATE} {KEY}; do \\",
        f"      echo --from-file={own}; done; done)",
    ]
