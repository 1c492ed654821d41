"""How fast is a training step on a CPU, beside what people use?

A GPT of 10.8 million parameters, fp32, batch 8 x 256. Each contestant is a process of
its own, set up once; they take their steps in turns, so that what else the machine does
falls on all alike. Contestants that are not installed are named and left out.

    python benchmarks/train_cpu.py --torch-python ../torch/bin/python
"""

import dataclasses
import statistics
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contestants.runner import HERE, Contestant
from benchmarks.record import write_result
from jaxpar.cli.recipe_flags import parse


@dataclasses.dataclass(frozen=True)
class Config:
    """What takes part, and how often."""

    shape: str = "10.8m"
    """Of the GPT: 10.8m, or nano, nanoGPT's CPU setting."""
    rounds: int = 8
    """Turns of each contestant; the median counts."""
    steps: int = 2
    """Timed steps a turn, behind one whose caches are another's."""
    torch_python: str = ""
    """An interpreter that has torch (and DeepSpeed); empty: this one."""
    only: str = ""
    """Contestants whose names contain this; empty: all."""
    write: bool = True
    """Write benchmarks/results/train_cpu.json."""


def commands_of(config: Config) -> dict[str, list[list[str]]]:
    """Contestant -> the commands of its workers."""
    shape = config.shape
    torch = [config.torch_python or sys.executable, str(HERE / "torch_gpt.py")]
    torch.append(shape)
    ours = [sys.executable, str(HERE / "jaxpar_gpt.py"), shape]
    commands = {
        "plain JAX": [[sys.executable, str(HERE / "plain_gpt.py"), shape]],
        "jaxpar": [[*ours, "1", "0"]],
        "torch eager": [[*torch, "eager"]],
        "torch compile": [[*torch, "compile"]],
    }
    for zero in range(4):
        commands[f"jaxpar ZeRO {zero}, 2 devices"] = [[*ours, "2", str(zero)]]
        worker = [*torch, "deepspeed", str(zero)]
        commands[f"DeepSpeed ZeRO {zero}, 2 workers"] = [worker, worker]
    return {name: c for name, c in commands.items() if config.only in name}


def start_all(
    config: Config, console: Console
) -> tuple[dict[str, Contestant], dict[str, str]]:
    """Start what can be started, one after the other; and the others' versions."""
    started, versions = {}, {}
    for name, commands in commands_of(config).items():
        contestant = Contestant(commands)
        try:
            versions |= contestant.read()["versions"]
            started[name] = contestant
            console.print(f"ready: {name}")
        except RuntimeError as error:
            contestant.stop()
            console.print(f"left out: {name}: {error}")
    return started, versions


def main(config: Config) -> None:
    """Run all contestants in turns and write the medians."""
    console = Console()
    contestants, versions = start_all(config, console)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    losses: dict[str, float] = {}
    try:
        for number in range(config.rounds + 1):
            for name, contestant in contestants.items():
                answer = contestant.take(1, config.steps)
                losses[name] = answer["losses"][-1]
                if number:  # The first round warms everything up.
                    times[name].append(answer["seconds_per_step"])
            console.print(f"round {number} of {config.rounds}")
    finally:
        for contestant in contestants.values():
            contestant.stop()
    medians = {name: statistics.median(found) for name, found in times.items()}
    table = Table("step", "seconds", "of plain JAX", "last loss")
    for name, median in medians.items():
        share = median / medians.get("plain JAX", median)
        table.add_row(name, f"{median:.3f}", f"{share:.2f}", f"{losses[name]:.3f}")
    console.print(table)
    if config.write:
        name = "train_cpu" if config.shape == "10.8m" else f"train_cpu_{config.shape}"
        measured = {"seconds": medians, "last_loss": losses, "others": versions}
        console.print(f"written: {write_result(name, measured).name}")


if __name__ == "__main__":
    main(parse(Config, __doc__))
