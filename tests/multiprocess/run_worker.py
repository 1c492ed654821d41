"""One process of a run of several, by the recipes' own loop.

    python -m tests.multiprocess.run_worker SPEC

SPEC is JSON: what `tests.multiprocess.worker.join` takes, ``folder``, ``steps``,
``save_every``, ``nan``: batches whose fourth row is not a number, and ``fails``: the
number of the save that fails in the second process, None for none.
"""

import errno
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from jaxpar.checkpoint.outcome import SaveOutcome
from tests.multiprocess.worker import join
from tests.runs import Data, fresh, go, nan_in_one_row


def main(spec: dict[str, Any]) -> None:
    join(spec)
    # Slowly enough for a failure to be known before the next save.
    pauses = range(spec["steps"]) if spec["fails"] is not None else ()
    data = Data(
        {ordinal: nan_in_one_row() for ordinal in spec["nan"]},
        {ordinal: lambda: time.sleep(0.3) for ordinal in pauses},
    )
    if spec["index"] == 1 and spec["fails"] is not None:
        fail(spec["fails"])
    options = {name: spec[name] for name in ("steps", "save_every")}
    go(fresh(), data, Path(spec["folder"]), **options)


def fail(number: int) -> None:
    """Let a save fail in this process, before the others know that it is written."""
    wait = SaveOutcome.wait_for_all

    def wait_for_all(self: SaveOutcome, name: str, seconds: float) -> None:
        if self._key.endswith(f"/{number}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        wait(self, name, seconds)

    SaveOutcome.wait_for_all = wait_for_all


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
