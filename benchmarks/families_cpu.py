"""How fast does each family train on a CPU, beside `transformers` or timm on torch?

Small models of every family, fp32, a batch of 8, AdamW; ours are read from the folders
that `transformers` writes. Contestants are processes of their own, set up once, and
take their steps in turns. jaxpar is timed on one CPU device, which runs its kernels on
all cores, and on two. Run it with an interpreter that has jaxpar and torch
(`jaxpar[oracle]`).

    python benchmarks/families_cpu.py
"""

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contestants import twin_models
from benchmarks.contestants.runner import HERE, Contestant
from benchmarks.record import write_result
from jaxpar.cli.recipe_flags import parse


@dataclasses.dataclass(frozen=True)
class Config:
    """What takes part, and how often."""

    rounds: int = 6
    """Turns of each contestant; the median counts."""
    steps: int = 4
    """Timed steps a turn, behind one whose caches are another's."""
    only: str = ""
    """Families whose names contain this; empty: all."""
    write: bool = True
    """Write benchmarks/results/families_cpu.json."""


def write_model(name: str, folder: str) -> None:
    """Write a family's random model of `transformers`; timm's are none."""
    twin = twin_models.TWINS[name]
    command = [sys.executable, str(HERE / "torch_model.py"), folder, twin.name]
    if twin.name:
        fields = json.dumps(twin.fields)
        subprocess.run([*command, fields], check=True, capture_output=True)


def take_turns(name: str, config: Config) -> dict[str, dict[str, float]]:
    """Contestant -> its median seconds a step and its first loss."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(name, folder)
        ours = [sys.executable, str(HERE / "jaxpar_twin.py"), name, folder]
        theirs = [sys.executable, str(HERE / "torch_twin.py"), name, folder]
        commands = {"torch": theirs, "one": [*ours, "1"], "two": [*ours, "2"]}
        started = {}
        try:
            for key, command in commands.items():
                started[key] = Contestant([command])
                started[key].read()
            times: dict[str, list[float]] = {key: [] for key in commands}
            losses: dict[str, float] = {}
            for number in range(config.rounds + 1):
                for key, contestant in started.items():
                    answer = contestant.take(1, config.steps)
                    losses.setdefault(key, answer["losses"][0])
                    if number:  # The first round warms everything up.
                        times[key].append(answer["seconds_per_step"])
        finally:
            for contestant in started.values():
                contestant.stop()
    return {
        key: {"seconds": statistics.median(found), "first_loss": losses[key]}
        for key, found in times.items()
    }


def main(config: Config) -> None:
    """Time all families and write the medians."""
    console, measured = Console(), {}
    table = Table("family", "torch, ms", "one device, ms", "two, ms", "best / torch")
    for name in twin_models.TWINS:
        if config.only not in name:
            continue
        found = measured[name] = take_turns(name, config)
        ms = {key: 1000 * each["seconds"] for key, each in found.items()}
        ratio = min(ms["one"], ms["two"]) / ms["torch"]
        row = [f"{ms[key]:.0f}" for key in ("torch", "one", "two")]
        table.add_row(name, *row, f"{ratio:.2f}")
        console.print(f"{name}: {found}")
    console.print(table)
    if config.write and not config.only:
        console.print(f"written: {write_result('families_cpu', measured).name}")


if __name__ == "__main__":
    main(parse(Config, __doc__))
