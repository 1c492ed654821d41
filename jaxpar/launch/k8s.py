"""How does a run start in a Kubernetes cluster? By a manifest, for kubectl to apply.

Each host is a pod of one indexed job, with one supervisor (`jaxpar launch local`), and
the supervisors find each other in the run's folder, on a volume. A JobSet makes the
pods and their names; a Kubeflow TrainJob makes a JobSet. A pod that is taken away is
replaced; a code that starting again would not mend ends the job.
"""

from typing import Any

from jaxpar.exit_codes import FINAL, STOPPED
from jaxpar.launch.k8s_job import NODE, K8s, check
from jaxpar.launch.k8s_pod import make_container, make_pod, secret_key
from jaxpar.launch.security import AUTHORITY, CERTIFICATE, KEY

_TRAINER = "trainer.kubeflow.org"
_PATCHABLE = (
    "terminationGracePeriodSeconds",
    "securityContext",
    "containers",
    "volumes",
)
"""What a TrainJob may change of the pods of a runtime."""


def write_manifest(job: K8s) -> None:
    """Write the manifest to the job's file, or print it.

    Raises:
      ValueError: if something can't be done; the message names the flag.
      FileNotFoundError: if the file's folder is not there.
      ModuleNotFoundError: without PyYAML.
    """
    text = manifest(job)
    if job.file is None:
        print(text, end="")
        return
    if not job.file.absolute().parent.is_dir():
        raise FileNotFoundError(
            f"--file {job.file}: there is no folder {job.file.parent}; make it first"
        )
    job.file.write_text(text, encoding="utf-8")


def manifest(job: K8s) -> str:
    """Write the manifest as YAML, below the commands that belong to it.

    Raises:
      ValueError: if something can't be done; the message names the flag.
      ModuleNotFoundError: without PyYAML.
    """
    made = objects(job)
    try:
        from jaxpar.launch.yaml_text import yaml_text  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "launch k8s needs PyYAML, which is not installed; run pip install "
            "'jaxpar[k8s]'"
        ) from error
    return "".join(f"# {line}\n" for line in _commands(job)) + yaml_text(made)


def objects(job: K8s) -> list[dict[str, Any]]:
    """Make what the manifest holds.

    Args:
      job: what to start.

    Returns:
      A JobSet; or a TrainJob, after its TrainingRuntime if the job names none.

    Raises:
      ValueError: if something can't be done; the message names the flag.
    """
    check(job)
    if job.kind == "jobset":
        spec = _job_set(job, make_container(job), {})
        return [_object(job, "jobset.x-k8s.io/v1alpha2", "JobSet", spec)]
    train_job = _object(job, f"{_TRAINER}/v1alpha1", "TrainJob", _train_job(job))
    if job.runtime is not None:
        return [train_job]
    # By these Trainer finds what its TrainJob is about.
    labels = {f"{_TRAINER}/trainjob-ancestor-step": "trainer"}
    runtime = {
        "mlPolicy": {"numNodes": job.hosts},
        "template": {"spec": _job_set(job, {}, labels)},
    }
    return [
        _object(job, f"{_TRAINER}/v1alpha1", "TrainingRuntime", runtime),
        train_job,
    ]


def _object(job: K8s, version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": job.name, "namespace": job.namespace}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _job_set(
    job: K8s, container: dict[str, Any], labels: dict[str, str]
) -> dict[str, Any]:
    """The pods, and what happens when one fails."""
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
        "template": {"spec": make_pod(job, container)},
    }
    metadata = {"metadata": {"labels": labels}} if labels else {}
    return {
        "network": {
            "enableDNSHostnames": True,
            "publishNotReadyAddresses": True,
            "subdomain": job.network,
        },
        "successPolicy": {"operator": "All"},
        "failurePolicy": {"maxRestarts": job.job_restarts, "rules": [final]},
        "replicatedJobs": [
            {"name": NODE, "replicas": 1, "template": {**metadata, "spec": indexed}}
        ],
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


def _train_job(job: K8s) -> dict[str, Any]:
    """The same pods, by Kubeflow Trainer."""
    container = make_container(job)
    resources = container.pop("resources", None)
    spec = {
        "runtimeRef": {
            "apiGroup": _TRAINER,
            "kind": "ClusterTrainingRuntime" if job.runtime else "TrainingRuntime",
            "name": job.runtime or job.name,
        },
        "trainer": {
            "numNodes": job.hosts,
            **container,
            **({"resourcesPerNode": resources} if resources else {}),
        },
    }
    if job.runtime is not None:
        spec["runtimePatches"] = [_patch(job)]
    return spec


def _patch(job: K8s) -> dict[str, Any]:
    """What the pods of somebody else's runtime lack."""
    pod = make_pod(job, {})
    pods = {"template": {"spec": {part: pod[part] for part in _PATCHABLE}}}
    jobs = {"replicatedJobs": [{"name": NODE, "template": {"spec": pods}}]}
    return {
        "manager": "jaxpar/launch",
        "trainingRuntimeSpec": {"template": {"spec": jobs}},
    }


def _commands(job: K8s) -> list[str]:
    """How the secret is made, and the run started."""
    apply = f"To start: kubectl apply -f {job.file or 'FILE'}"
    if not job.secret:
        return [apply]
    hosts = f"$(seq 0 {job.hosts - 1})"
    authority = f"{secret_key(AUTHORITY, 0)}=certs/$(host 0)/{AUTHORITY}"
    own = f"{secret_key('$file', '$i')}=certs/$(host $i)/$file"
    return [
        "Once, before, where nobody else can read:",
        f"  host() {{ echo {job.address('$1')}; }}",
        f"  jaxpar launch certs $(for i in {hosts}; do host $i; done) --out certs",
        f"  kubectl create secret generic {job.secret} -n {job.namespace} \\",
        f"    --from-file={authority} \\",
        f"    $(for i in {hosts}; do for file in {CERTIFICATE} {KEY}; do \\",
        f"      echo --from-file={own}; done; done)",
        apply,
    ]
