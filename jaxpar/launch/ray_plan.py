"""What does the launcher tell Ray's workers, and where do they tell what became of it?

In the run's folder: ``launch/ray-0001`` and so on, one for each time that Ray started
the workers, over all launches of the run. It holds what a supervisor's attempts hold.
"""

import dataclasses
from pathlib import Path

from jaxpar.launch.limits import Limits

_PREFIX = "ray-"


@dataclasses.dataclass(frozen=True)
class RayPlan:
    """What all workers are to do.

    Attributes:
      command: the script and its flags.
      folder: the run's; this and all other paths are absolute.
      working_folder: to run the script in.
      stop: workers save and end once this file is there.
      on_cpu: whether they are to use nothing but the CPU.
      tls: folder of each host's certificates; None for none.
      insecure: listen on an address that others reach, without certificates.
      limits: how long a worker may be at one thing.
    """

    command: tuple[str, ...]
    folder: Path
    working_folder: Path
    stop: Path
    on_cpu: bool
    tls: Path | None
    insecure: bool
    limits: Limits


def attempts(folder: Path) -> list[int]:
    """The numbers of a run's attempts under Ray so far, in order."""
    found = (folder / "launch").glob(f"{_PREFIX}[0-9]*")
    return sorted(int(path.name.removeprefix(_PREFIX)) for path in found)


def attempt_folder(folder: Path, number: int) -> Path:
    """Where the workers of an attempt tell what they are at."""
    return folder / "launch" / f"{_PREFIX}{number:04d}"
