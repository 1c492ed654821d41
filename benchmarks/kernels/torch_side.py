"""What does torch measure of a part? Asked of an interpreter that has it."""

import json
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contestants.runner import HERE
from benchmarks.kernels import attention, optimizers


def of_torch(
    python: str,
    part: str,
    *,
    size: int,
    rounds: int,
    minutes: float,
    names: Iterable[str] | None = None,
) -> dict[str, dict[str, float]]:
    """Measure a part's cases in a process of its own.

    Args:
      python: an interpreter that has torch.
      part: of `attention.PARTS`, or a model of the optimizers'.
      size: of an attention head.
      rounds: timed rounds of each.
      minutes: after which it is stopped; what it had measured by then counts.
      names: of the cases; None for all.

    Returns:
      Name -> what was measured; empty where it fails, which is printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        if part in optimizers.ALL_MODELS:
            shapes = json.dumps(optimizers.shapes_of(part))
            args = ["adamw", str(rounds), shapes]
        else:
            path = Path(folder, "cases.npz")
            np.savez(path, allow_pickle=False, **layouts_of(part, size, names))
            args = ["attention", str(path), str(rounds)]
        command = [python, str(HERE / "torch_kernels.py"), *args]
        with (
            Path(folder, "out").open("w+") as out,
            Path(folder, "err").open("w+") as err,
        ):
            try:
                subprocess.run(
                    command, stdout=out, stderr=err, timeout=60 * minutes, check=True
                )
            except (subprocess.SubprocessError, OSError) as error:
                err.seek(0)
                print(f"torch: {error} {err.read().splitlines()[-1:]}", flush=True)
            out.seek(0)
            lines = [line for line in out if line.startswith("@@")]
    answers = [json.loads(line[2:]) for line in lines]
    for version in {answer["torch"] for answer in answers}:
        print(f"torch {version}", flush=True)
    return {answer["name"]: answer["found"] for answer in answers}


def layouts_of(part: str, size: int, names: Iterable[str] | None) -> dict[str, Any]:
    """The layouts and shapes of an attention part's cases, as torch reads them."""
    arrays = {}
    for case in attention.cases_of(part):
        if names is None or case.name in names:
            arrays[case.name] = np.asarray(case.layout.blocks)
            arrays[f"{case.name}/shape"] = np.array(case.shape(size))
    return arrays
