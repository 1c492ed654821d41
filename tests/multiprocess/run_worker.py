"""One process of a run of several, by the recipes' own loop.

    python -m tests.multiprocess.run_worker SPEC

SPEC is JSON: what `tests.multiprocess.worker.join` takes, ``folder``, ``steps``, and
``nan``: batches whose fourth row is not a number.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.multiprocess.worker import join
from tests.runs import Data, fresh, go, nan_in_one_row


def main(spec: dict[str, Any]) -> None:
    join(spec)
    data = Data({ordinal: nan_in_one_row() for ordinal in spec["nan"]})
    go(fresh(), data, Path(spec["folder"]), steps=spec["steps"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
