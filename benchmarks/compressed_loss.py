"""What do fewer bytes cost in held-out loss: techniques beside AdamW, over seeds.

Starts ``recipes/pretrain.py`` as users do, on CPU devices, once for each seed and
technique, one after the other; what is found so far is written after each run, and a
run that is there already, with the same flags, is not done again.

    python benchmarks/compressed_loss.py
    python benchmarks/compressed_loss.py --only "1-bit Adam" AdamW --rate 5e-3
"""

import dataclasses
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.record import RESULTS, write_result
from jaxpar.cli.recipe_flags import parse

ROOT = Path(__file__).resolve().parents[1]
NAME = "compressed_loss"

_TWO = "--mesh.data 2 --zero 1"
_REPLICAS = "--mesh.data 1 --mesh.replica 2"
_FOUR = "--mesh.data 2 --mesh.replica 2 --zero 3"
TECHNIQUES = {
    "AdamW": _TWO,
    "1-bit Adam": f"{_TWO} --optimizer onebit_adam",
    "0/1 Adam": f"{_TWO} --optimizer zero_one_adam",
    "0/1 Adam, longer intervals later": f"{_TWO} --optimizer zero_one_adam "
    "--optimizer.local-step-scaler 180 --optimizer.var-update-scaler 50",
    "local SGD": f"{_REPLICAS} --join-every 16 --join-rate 1 --join-momentum 0",
    "DiLoCo": f"{_REPLICAS} --join-every 16",
    "weights in 8 bits": f"{_FOUR} --weight-bits 8",
    "gradients in 8 bits, hpZ": f"{_FOUR} --gradient-bits 8 --secondary",
    "all of ZeRO++": f"{_FOUR} --weight-bits 8 --gradient-bits 4 --inside-bits 8 "
    "--secondary",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Which runs."""

    only: tuple[str, ...] = ()
    """Of the techniques; empty for all."""
    seeds: int = 3
    """Runs of each, with seeds from 0."""
    rate: float = 2e-3
    """The peak of the learning rate, of all."""
    steps: int = 500
    """Of each run; a fifth is the warm-up of optimizers that have one."""


def heldout(flags: list[str]) -> float:
    """Train, and read the loss that the recipe prints; nats a byte."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                sys.executable,
                str(ROOT / "recipes/pretrain.py"),
                f"--out={folder}/run",
                *flags,
            ],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
    found = re.findall(r"held-out (\S+) nats a byte", done.stdout)
    if done.returncode or len(found) != 1:
        raise SystemExit(f"{' '.join(flags)}: failed:\n{done.stderr[-2000:]}")
    return float(found[0])


def known(name: str) -> dict[str, float]:
    """Losses of earlier runs of a benchmark, by their flags."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["measured"]["runs"] if path.is_file() else {}


def compared(
    benchmark: str, techniques: Mapping[str, str], config: Any, *, plain: str
) -> None:
    """Run, print and record.

    Args:
      benchmark: its name.
      techniques: name -> the recipe's flags.
      config: which runs, as `Config`.
      plain: the one that the others are compared with.
    """
    unknown = set(config.only) - set(techniques)
    if unknown:
        names = ", ".join(techniques)
        raise SystemExit(f"--only {', '.join(unknown)}: must be among {names}.")
    console, runs = Console(), known(benchmark)
    of_name: dict[str, list[float]] = {}
    for name in config.only or techniques:
        for seed in range(config.seeds):
            text = (
                f"--steps {config.steps} --learning-rate {config.rate:g} "
                f"--seed {seed} {techniques[name]}"
            )
            if text not in runs:
                runs[text] = heldout(text.split())
                write_result(benchmark, {"runs": runs})
            of_name.setdefault(name, []).append(runs[text])
            console.print(f"{name}, seed {seed}: {runs[text]:.3f}", soft_wrap=True)
    console.print(table(of_name, config.rate, plain))


def table(of_name: dict[str, list[float]], rate: float, plain: str) -> Any:
    """Means over seeds, beside those of `plain`."""
    found = Table("", "mean", "lowest to highest", f"beside {plain}")
    found.title = f"held out, nats a byte; peak rate {rate:g}"
    its = statistics.mean(of_name[plain]) if plain in of_name else None
    for name, losses in of_name.items():
        mean = statistics.mean(losses)
        beside = "" if its is None else f"{mean / its - 1:+.1%}"
        spread = f"{min(losses):.3f} to {max(losses):.3f}"
        found.add_row(name, f"{mean:.3f}", spread, beside)
    return found


if __name__ == "__main__":
    compared(NAME, TECHNIQUES, parse(Config, __doc__), plain="AdamW")
