"""Small runs of one process, on a disk that fails.

    python -m tests.faulty_run SPEC

SPEC is JSON: ``cache``, of compiled programs; ``seconds``, for each operation to
succeed; ``runs``, each the fields of `tests.faults.Faults`. Prints a line of JSON for
each run: its seed, how it ended, the seconds that it took, and a hash of its state.
"""

import faulthandler
import hashlib
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import jax

from jaxpar.launch import own_files
from jaxpar.training.signals import RunStopped
from tests.faults import Faults
from tests.runs import Data, bits, fresh, go

STEPS, SAVE_EVERY = 9, 3


def main(spec: dict[str, Any]) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_compilation_cache_dir", spec["cache"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    warnings.simplefilter("always")
    own_files.SECONDS = spec["seconds"]
    fresh()
    for each in spec["runs"]:
        faults = Faults(**each | {"folder": Path(each["folder"])})
        began, engine, ended = time.monotonic(), fresh(), "done"
        faulthandler.dump_traceback_later(spec.get("limit", 60), exit=True)
        faults.begin()
        try:
            for steps in (STEPS // 2, STEPS):  # The second start resumes.
                engine = fresh()
                go(engine, Data(), faults.folder, steps=steps, save_every=SAVE_EVERY)
        except (OSError, RunStopped) as error:
            ended = f"{type(error).__name__}: {error}"
        Faults(Path("/nowhere")).begin()
        state = hashlib.sha256(b"".join(bits(engine))).hexdigest()
        seconds = time.monotonic() - began
        line = {"seed": faults.seed, "ended": ended, "seconds": seconds, "state": state}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
