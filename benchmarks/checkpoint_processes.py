"""Do verifying and restoring a checkpoint take less time with more processes?

States of 0.5 and 2 GB on eight CPU devices, of one process, two and four on one
machine. Of each process the CPU seconds (of all its threads, since the processes share
the cores): of a whole save, of hashing the step's files as a save does, and of a
restore, which compares all that it reads. Medians over turns, of the process that needs
most; the mark: one process needs at least 0.8 P times what each of P processes does.

    python benchmarks/checkpoint_processes.py --folder /path/on/the/disk
"""

import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.checkpoint import DEVICES, make_state
from benchmarks.record import write_result
from jaxpar.checkpoint import Checkpoints
from jaxpar.checkpoint import folder as files
from jaxpar.checkpoint.logs import quiet_orbax
from jaxpar.checkpoint.outcome import SaveOutcome
from jaxpar.checkpoint.sealing import seal_together
from jaxpar.cli.recipe_flags import parse

ROOT = Path(__file__).resolve().parents[1]
MARK = 0.8
NOT_A_SAVE = 1000
"""Numbers of outcomes from here on are of no save."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What is measured, and where."""

    folder: Path = Path(".")
    """On the disk; a temporary folder is made in it, and deleted."""
    processes: tuple[int, ...] = (1, 2, 4)
    """Numbers of processes, the first of which is the measure of the others."""
    gigabytes: tuple[float, ...] = (0.5, 2.0)
    """Sizes of the state; the result is written for the defaults only."""
    repeats: int = 3
    """Turns, after one that compiles."""


def cpu_seconds(run: Callable[[], Any]) -> float:
    """CPU seconds of all threads of this process while a function runs."""
    began = time.process_time()
    run()
    return time.process_time() - began


def one_turn(
    step: int, state: dict[str, jax.Array], checkpoints: Checkpoints, folder: Path
) -> dict[str, float]:
    """Save, hash and restore; CPU seconds of this process."""

    def save() -> None:
        checkpoints.save(step, state)
        checkpoints.wait()

    def seal() -> None:
        outcome = SaveOutcome(NOT_A_SAVE + 2 * step, step)
        seal_together(outcome, files.step_path(folder, step))
        outcome.close()

    def restore() -> None:
        jax.block_until_ready(Checkpoints(folder).restore(state).tree)

    parts = {"save": save, "seal": seal, "restore": restore}
    return {name: cpu_seconds(part) for name, part in parts.items()}


def work(spec: dict[str, Any]) -> None:
    """Be one of the processes; print what each turn took."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES // spec["count"])
    if spec["count"] > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            spec["coordinator"],
            num_processes=spec["count"],
            process_id=spec["index"],
        )
    quiet_orbax()
    state = jax.block_until_ready(make_state(spec["gigabytes"]))
    folder = Path(spec["folder"]) / "run"
    checkpoints = Checkpoints(folder, keep=1)
    turns = [
        one_turn(step, state, checkpoints, folder)
        for step in range(spec["repeats"] + 1)
    ]
    checkpoints.close()
    print(json.dumps(turns[1:]))


def measure(
    count: int, gigabytes: float, repeats: int, folder: Path
) -> list[list[dict[str, float]]]:
    """CPU seconds by process and turn."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    spec = {
        "coordinator": coordinator,
        "count": count,
        "gigabytes": gigabytes,
        "repeats": repeats,
        "folder": str(folder),
    }
    code = "from benchmarks.checkpoint_processes import work; import json, sys; "
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"{code}work(json.loads(sys.argv[1]))",
                json.dumps(spec | {"index": index}),
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    texts = [process.communicate()[0] for process in started]
    codes = [process.returncode for process in started]
    if any(codes):
        raise RuntimeError(f"{count} processes ended with codes {codes}")
    return [json.loads(text.splitlines()[-1]) for text in texts]


def summary(turns: list[list[dict[str, float]]]) -> dict[str, Any]:
    """Medians over turns, of each process and of the one that needs most."""
    by_turn = list(zip(*turns, strict=True))
    return {
        name: {
            "by_process": [statistics.median(t[name] for t in own) for own in turns],
            "largest": statistics.median(
                max(own[name] for own in turn) for turn in by_turn
            ),
        }
        for name in by_turn[0][0]
    }


def compare(gigabytes: float, config: Config) -> dict[int, dict[str, Any]]:
    """Measure a state by number of processes; what each has of linear."""
    found: dict[int, dict[str, Any]] = {}
    for count in config.processes:
        with tempfile.TemporaryDirectory(dir=config.folder, prefix="save-") as made:
            folder = Path(made).absolute()
            found[count] = summary(measure(count, gigabytes, config.repeats, folder))
        first = config.processes[0]
        for name, part in found[count].items():
            over = count / first * part["largest"]
            part["of_linear"] = found[first][name]["largest"] / over
    return found


def main(config: Config) -> None:
    """Measure, print, write."""
    console = Console(highlight=False)
    found = {}
    for gigabytes in config.gigabytes:
        found[f"{gigabytes:g} GB"] = rows = compare(gigabytes, config)
        table = Table(title=f"{gigabytes:g} GB, CPU seconds", box=box.SIMPLE)
        for title in ("processes", "of", "by process", "largest", "of linear"):
            table.add_column(title, justify="right")
        for count, parts in rows.items():
            for name, part in parts.items():
                own = " ".join(f"{seconds:.3f}" for seconds in part["by_process"])
                largest, ratio = f"{part['largest']:.3f}", f"{part['of_linear']:.2f}"
                table.add_row(str(count), name, own, largest, ratio)
        console.print(table)
    console.print(f"mark: seal and restore {MARK} of linear")
    if config == dataclasses.replace(Config(), folder=config.folder):
        console.print(write_result("checkpoint_processes", found))


if __name__ == "__main__":
    main(parse(Config, __doc__))
