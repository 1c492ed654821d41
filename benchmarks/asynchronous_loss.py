"""What do an asynchronous pipeline's delays cost in held-out loss, over seeds?

Starts ``recipes/pretrain.py`` as users do, on CPU devices, with each schedule and the
same steps; what is found so far is written after each run, and a run that is there
already, with the same flags, is not done again.

    python benchmarks/asynchronous_loss.py
    python benchmarks/asynchronous_loss.py --only "2BW, 2 stages" --rate 1e-3
"""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.compressed_loss import compared
from jaxpar.cli.recipe_flags import parse

NAME = "asynchronous_loss"
_TWO = "--mesh.data 1 --mesh.pipe 2 --zero 1 --accumulate 4"
_FOUR = "--mesh.data 1 --mesh.pipe 4 --zero 1 --accumulate 8"
_FEW = "--mesh.data 1 --mesh.pipe 4 --zero 1 --accumulate 2"
SCHEDULES = {
    "1F1B": f"{_TWO} --schedule 1f1b",
    "2BW, 2 stages": f"{_TWO} --schedule pipedream_2bw",
    "2BW, 4 stages": f"{_FOUR} --schedule pipedream_2bw",
    "PipeMare, 4 stages": f"{_FOUR} --schedule pipemare",
    "PipeMare, 4 stages, 2 micro-batches": f"{_FEW} --schedule pipemare",
}
"""Name -> flags; the gradients of 1F1B are the same on any number of stages."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Which runs."""

    only: tuple[str, ...] = ()
    """Of the schedules; empty for all."""
    seeds: int = 1
    """Runs of each, with seeds from 0."""
    rate: float = 2e-3
    """The peak of the learning rate, of all."""
    steps: int = 500
    """Of each run."""


if __name__ == "__main__":
    config = parse(Config, __doc__)
    compared(NAME, SCHEDULES, config, plain="1F1B")
