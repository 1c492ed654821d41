"""What does a host's pod run, on which volumes, and what may it do?"""

import dataclasses
from typing import Any

from jaxpar.launch.k8s_job import NODE, K8s
from jaxpar.launch.limits import Limits
from jaxpar.launch.security import AUTHORITY, CERTIFICATE, KEY

_INDEX, _POD_IP = "JOB_COMPLETION_INDEX", "POD_IP"
_SECRET, _CERTS, _HOME = (f"/run/jaxpar/{name}" for name in ("secret", "certs", "home"))


def make_pod(job: K8s, container: dict[str, Any]) -> dict[str, Any]:
    """Make the spec of a host's pod.

    Args:
      job: whose.
      container: what it runs, by `make_container`; empty where that is said elsewhere.

    Returns:
      A PodSpec that the strictest pod security standard takes.
    """
    volumes = _volumes(job)
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": job.user,
            "runAsGroup": job.user,
            "fsGroup": job.user,
            # Otherwise every start visits all files of the volume.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": NODE,
                **container,
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": _mounts(job),
            }
        ],
        "volumes": [{"name": name, **source} for name, _, source in volumes],
    }


def make_container(job: K8s) -> dict[str, Any]:
    """Make what a host's container runs: one supervisor.

    Returns:
      image, command, args, env and, with GPUs, resources.
    """
    found: dict[str, Any] = {
        "image": job.image,
        "command": _command(job),
        "args": _arguments(job),
        "env": _environment(job),
    }
    if job.gpus:
        found["resources"] = {"limits": {"nvidia.com/gpu": job.gpus}}
    return found


def secret_key(file: str, index: int | str) -> str:
    """The secret's key for a file of a host's certificates; all have one authority."""
    return file if file == AUTHORITY else f"{index}.{file}"


def _volumes(job: K8s) -> list[tuple[str, str, dict[str, Any]]]:
    """(name, path, source) of each."""
    claim = {"persistentVolumeClaim": {"claimName": job.claim}}
    found: list[tuple[str, str, dict[str, Any]]] = [
        ("runs", str(job.mount), claim),
        # For an image that does not know the user; compiled programs are kept there.
        ("home", _HOME, {"emptyDir": {}}),
    ]
    if job.gpus:
        found.append(("shm", "/dev/shm", {"emptyDir": {"medium": "Memory"}}))
    if job.secret:
        # The files are root's; the pod's user reads them by its group.
        sources = [{"secret": {"name": name}} for name in job.secrets]
        files = {"projected": {"sources": sources, "defaultMode": 0o440}}
        own = {"emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}
        found += [("secret", _SECRET, files), ("certs", _CERTS, own)]
    return found


def _mounts(job: K8s) -> list[dict[str, Any]]:
    """Where the volumes are; of the secret, a pod sees its own host's files alone."""
    found = [
        {"name": name, "mountPath": path}
        for name, path, _ in _volumes(job)
        if path != _SECRET
    ]
    if job.secret:
        found += [
            {
                "name": "secret",
                "mountPath": f"{_SECRET}/{file}",
                "subPathExpr": secret_key(file, f"$({_INDEX})"),
                "readOnly": True,
            }
            for file in (AUTHORITY, CERTIFICATE, KEY)
        ]
    return found


def _command(job: K8s) -> list[str]:
    """``jaxpar``, after the pod's certificates are where only its user reads them.

    `read_tls` refuses the secret's own files, which a group can read.
    """
    if not job.secret:
        return ["jaxpar"]
    copies = [
        f"cp -f {_SECRET}/{file} {_CERTS}/{file}"
        for file in (AUTHORITY, CERTIFICATE, KEY)
    ]
    steps = " && ".join(["umask 077", *copies, 'exec "$@"'])
    return ["sh", "-c", steps, "sh", "jaxpar"]


def _arguments(job: K8s) -> list[str]:
    """The supervisor's flags."""
    typed = {
        "--out": _literal(str(job.folder)),
        "--hosts": job.hosts,
        "--host": f"$({_INDEX})",
        "--processes": job.processes or max(job.gpus, 1),
        "--address": _address(job),
        "--restarts": job.restarts,
    }
    if job.port is not None:
        typed["--port"] = job.port
    if job.secret:
        typed["--tls"] = _CERTS
    for field in dataclasses.fields(Limits):
        seconds = getattr(job.limits, field.name)
        if seconds != field.default:
            typed[f"--limits.{field.name}"] = seconds
    found = ["launch", "local", _literal(str(job.script))]
    for flag, value in typed.items():
        found += [flag, str(value)]
    if job.insecure:
        found.append("--insecure")
    if job.gpus:
        # The host's numbers in a pod's /dev are not those that CUDA gives them there.
        found += ["--gpus", *map(str, range(job.gpus))]
    if job.flags:
        found += ["--", *map(_literal, job.flags)]
    return found


def _address(job: K8s) -> str:
    if job.secret:
        return job.address(f"$({_INDEX})")
    return "127.0.0.1" if job.hosts == 1 else f"$({_POD_IP})"


def _environment(job: K8s) -> list[dict[str, Any]]:
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return [
        {"name": _INDEX, "valueFrom": {"fieldRef": {"fieldPath": index}}},
        {"name": _POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "HOME", "value": _HOME},
    ]


def _literal(text: str) -> str:
    """Text in which Kubernetes finds no variable of its own."""
    return text.replace("$", "$$")
