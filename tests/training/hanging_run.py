"""A small run whose second save hangs.

python -m tests.training.hanging_run FOLDER END_SECONDS CACHE
"""

import dataclasses
import sys
import time
from pathlib import Path

import jax

from jaxpar.checkpoint.folder import is_complete, step_path
from tests.faults import Faults
from tests.runs import RULES, Data, fresh, go


def main(folder: str, seconds: str, cache: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    faults = Faults(Path(folder), slow=(0.0, 1e9))

    def begin() -> None:
        while not is_complete(step_path(faults.folder / "checkpoints", 3)):
            time.sleep(0.01)
        faults.begin()

    data = Data(calls={4: begin})  # Before the save of step 6.
    recovery = dataclasses.replace(RULES, end_seconds=float(seconds))
    go(fresh(), data, Path(folder), steps=40, save_every=3, recovery=recovery)


if __name__ == "__main__":
    main(*sys.argv[1:])
