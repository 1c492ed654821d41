"""Is a worker really one of its group, or alone and nobody noticed?

    python -m jaxpar.launch.worker one_job.py SCRIPT [FLAGS]

Workers that never found each other train as well, each the whole run: no error, and
as many models as workers. So a launcher that leaves starting processes to another
engine has this in front of the script.
"""

import runpy
import sys
from pathlib import Path

import jax

from jaxpar.exit_codes import REFUSED
from jaxpar.launch.contract import Worker, current
from jaxpar.stopping import RunStopped


def require_joined(worker: Worker) -> None:
    """Refuse a worker that has not joined the others; asks for no devices.

    Raises:
      ValueError: if it is to be one of several and is on its own.
    """
    if worker.processes > 1 and not jax.distributed.is_initialized():
        raise ValueError(_alone(worker, 1))


def require_one_job(worker: Worker) -> None:
    """Refuse devices that are not of one job; for when there are devices.

    Raises:
      RunStopped: with `REFUSED`, if JAX counts other processes than were launched.
    """
    found = jax.process_count()
    if found != worker.processes:
        raise RunStopped(REFUSED, _alone(worker, found))


def _alone(worker: Worker, found: int) -> str:
    return (
        f"worker {worker.index} of {worker.processes} is in a job of {found} "
        f"process{'es' * (found > 1)}: each would train the whole run by itself. Start "
        "workers by `jaxpar launch`, which has them join, and leave joining to it"
    )


def main() -> None:
    """Run the script that is named first."""
    worker = current()
    assert worker is not None, "jaxpar.launch.worker has looked"
    require_joined(worker)
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent.absolute())
    runpy.run_path(sys.argv[0], run_name="__main__")
    require_one_job(worker)


if __name__ == "__main__":
    main()
