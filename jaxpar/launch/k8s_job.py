"""What can a run in a Kubernetes cluster be asked for, and what can't be done?"""

import dataclasses
import re
from pathlib import Path

from jaxpar.launch.limits import Limits

NODE = "node"
"""The name of the replicated job and of the container."""

HOSTS_IN_SECRET = 1000
"""At up to 900 bytes each; Kubernetes takes 1 MiB."""

_LABEL, _LONGEST_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?"), 63
_PART = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_NAME, _LONGEST_NAME = re.compile(rf"{_PART}(\.{_PART})*"), 253
_POD_SUFFIX = "-abcde"
"""As long as what makes a pod's name unique."""
_LONGEST_IN_CERTIFICATE = 64


@dataclasses.dataclass(frozen=True)
class K8s:
    """Write a JobSet that starts a run in a Kubernetes cluster.

    Nothing is started: kubectl apply does that, in a cluster that has JobSet. The image
    has jaxpar and the script.

    Attributes:
      script: in the image or on the volume. Its own flags follow after ``--``; who can
        read the manifest can read them.
      name: of the job; lower-case letters, digits and -.
      image: of the pods.
      claim: of the persistent volume with the run's folder; on several hosts it must
        be one that all can write (ReadWriteMany).
      mount: where the volume is in the pods.
      out: the run's folder, below the mount; there by the job's name if not given.
      hosts: pods.
      processes: workers of each pod; if not given, one for each GPU, else one.
      gpus: NVIDIA GPUs of each pod.
      namespace: of the cluster.
      subdomain: that the pods are named in; the job's name if not given.
      domain: of the cluster.
      secret: with the hosts' certificates; the manifest says how to make it. With more
        than 1,000 hosts there are several, with numbers at the end of their names.
      insecure: let whoever reaches the pods connect to the coordinator.
      port: that the coordinator listens on; if not given, a free one.
      limits: how long a worker may be at one thing before the group is started again.
      restarts: of the group within an hour, at most.
      job_restarts: of all pods, after supervisors that gave up or were lost.
      user: number of the user and the group that pods run as; not root's.
      grace: seconds to save in, after which a pod that is taken away is killed.
      file: to write; printed if not given.
      flags: of the script.
    """

    script: Path
    name: str
    image: str
    claim: str
    mount: Path = Path("/runs")
    out: Path | None = None
    hosts: int = 1
    processes: int | None = None
    gpus: int = 0
    namespace: str = "default"
    subdomain: str | None = None
    domain: str = "cluster.local"
    secret: str | None = None
    insecure: bool = False
    port: int | None = None
    limits: Limits = dataclasses.field(default_factory=Limits)
    restarts: int = 10
    job_restarts: int = 3
    user: int = 1000
    # A supervisor waits 600 s for its workers to save.
    grace: int = 660
    file: Path | None = None
    flags: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The run's, in the pods."""
        return self.mount / self.name if self.out is None else self.out

    @property
    def network(self) -> str:
        """What the pods are named in."""
        return self.subdomain or self.name

    @property
    def secrets(self) -> dict[str, range]:
        """The secrets with the hosts' certificates, and the hosts that each one has.

        One secret takes no more than `HOSTS_IN_SECRET`.
        """
        if self.secret is None:
            return {}
        begins = range(0, self.hosts, HOSTS_IN_SECRET)
        return {
            self.secret if len(begins) == 1 else f"{self.secret}-{i}": range(
                begin, min(begin + HOSTS_IN_SECRET, self.hosts)
            )
            for i, begin in enumerate(begins)
        }

    def address(self, index: int | str) -> str:
        """Of a pod, as its certificate has it and as the others reach it.

        The whole name is in the pod's own hosts file from its start on; DNS has it
        later.
        """
        host = f"{self.name}-{NODE}-0-{index}"
        return f"{host}.{self.network}.{self.namespace}.svc.{self.domain}"


def check(job: K8s) -> None:
    """Refuse what can't be done.

    Raises:
      ValueError: for it; the message names the flag.
    """
    _check_names(job)
    _check_numbers(job)
    _check_places(job)
    _check_security(job)


def _check_names(job: K8s) -> None:
    last = f"-{NODE}-0-{job.hosts - 1}{_POD_SUFFIX}"
    of_label = "lower-case letters, digits and -, beginning with a letter"
    of_name = "lower-case letters, digits, - and ."
    names = (
        ("--name", job.name, _LABEL, _LONGEST_LABEL - len(last), of_label),
        ("--subdomain", job.subdomain, _LABEL, _LONGEST_LABEL, of_label),
        ("--namespace", job.namespace, re.compile(_PART), _LONGEST_LABEL, of_name),
        ("--domain", job.domain, _NAME, _LONGEST_NAME, of_name),
        ("--claim", job.claim, _NAME, _LONGEST_NAME, of_name),
        ("--secret", next(reversed(job.secrets), None), _NAME, _LONGEST_NAME, of_name),
    )
    for flag, name, pattern, longest, form in names:
        if name is not None and not (pattern.fullmatch(name) and len(name) <= longest):
            raise ValueError(
                f"{flag} {name!r}: must be {form}, ending with a letter or digit, at "
                f"most {longest} characters, for example 'gpt-1'"
            )
    if not re.fullmatch(r"\S+", job.image) or not job.image.isprintable():
        raise ValueError(
            f"--image {job.image!r}: must name an image that has jaxpar, for example "
            "'registry.example.com/team/train:1'"
        )


def _check_numbers(job: K8s) -> None:
    for flag, number, least, most in (
        ("--hosts", job.hosts, 1, None),
        ("--processes", job.processes, 1, None),
        ("--gpus", job.gpus, 0, None),
        ("--port", job.port, 1024, 65535),
        ("--restarts", job.restarts, 0, None),
        ("--job-restarts", job.job_restarts, 0, None),
        ("--user", job.user, 1, None),
        ("--grace", job.grace, 1, None),
    ):
        if number is None or (least <= number and (most is None or number <= most)):
            continue
        wanted = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{flag} {number}: must be {wanted}")
    if job.gpus and job.processes and job.gpus % job.processes:
        raise ValueError(
            f"--processes {job.processes}: {job.gpus} GPUs can't be shared out evenly; "
            "choose a divisor of --gpus"
        )


def _check_places(job: K8s) -> None:
    texts = (("SCRIPT", job.script), ("--mount", job.mount), ("--out", job.folder))
    for flag, text in (*texts, *(("--", flag) for flag in job.flags)):
        if re.search("[\ud800-\udfff]", str(text)):  # Bytes of another encoding.
            raise ValueError(
                f"{flag} {str(text)!r}: must be UTF-8, as a manifest is; rename it"
            )
    if job.file is not None and not str(job.file).isprintable():
        raise ValueError(
            f"--file {str(job.file)!r}: must have no control characters, for the "
            "commands that are printed; choose another name"
        )
    if not job.script.name:
        raise ValueError(
            f"SCRIPT {str(job.script)!r}: must be a file in the image or on the volume"
        )
    is_whole = job.mount.is_absolute() and job.mount.name
    if not is_whole or ".." in job.mount.parts or ":" in str(job.mount):
        raise ValueError(
            f"--mount {job.mount}: must be a folder's whole path in the pods, without "
            "a colon, for example /runs"
        )
    if job.mount not in job.folder.parents or ".." in job.folder.parts:
        raise ValueError(
            f"--out {job.folder}: must be below --mount ({job.mount}), where the "
            "volume is: what is elsewhere ends with the pod, and other hosts can't "
            "see it"
        )


def _check_security(job: K8s) -> None:
    if job.secret and job.insecure:
        raise ValueError(
            f"--insecure: --secret {job.secret} has certificates; leave one of them out"
        )
    if job.hosts > 1 and not job.secret and not job.insecure:
        raise ValueError(
            f"--hosts {job.hosts}: other pods can reach the coordinator, and it lets "
            "in whoever connects. Name a secret for the hosts' certificates (--secret "
            "NAME; the manifest says how to make it), or give --insecure in a cluster "
            "that is yours alone"
        )
    longest = job.address(job.hosts - 1)
    if job.secret and len(longest) > _LONGEST_IN_CERTIFICATE:
        raise ValueError(
            f"--name {job.name}: certificates take host names of at most "
            f"{_LONGEST_IN_CERTIFICATE} characters, and {longest} has {len(longest)}; "
            "choose a shorter --name, --subdomain or --namespace"
        )
