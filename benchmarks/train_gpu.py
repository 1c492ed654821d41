"""How fast is a training step on one GPU, beside what people use?

GPT-2 of 124 and 350 million parameters and GPT-3's 1.3 billion, in bf16 on fp32 master
parameters, nothing recomputed: jaxpar's engine, the step written by hand in JAX with
cuDNN's attention, and a torch.compile'd GPT with flash attention and fused AdamW. Each
takes its turn alone on the GPU, in a process of its own, in one order and then in the
other.

Without a GPU the engine's step is compiled for an H200 instead; where a GPU would run
cuDNN's attention stands a call of its size.

    python benchmarks/train_gpu.py --part 124m
"""

import dataclasses
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(sys.prefix) / "compilers"))

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from benchmarks.contestants.jaxpar_gpt import make_engine
from benchmarks.contestants.protocol import SHAPES, Shape
from benchmarks.contestants.runner import HERE, Contestant
from benchmarks.record import write_result
from jaxpar.cli.recipe_flags import parse
from jaxpar.compiled.program import read_program
from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.planner.absent_devices import gpu_devices, prepare_process

PEAK_FLOPS = {"A100": 312e12, "H100": 989.4e12, "H200": 989.4e12, "B200": 2250e12}
"""bf16, dense, a second. Source: NVIDIA's data sheets of the SXM modules."""
MFU_FORMULA = "tokens/s x (6 N + 12 L D T) / peak rate"
PARTS = [name for name, shape in SHAPES.items() if shape.device == "gpu"]


@dataclasses.dataclass(frozen=True)
class Config:
    """What to measure, and for how long."""

    part: str = ""
    """124m, 350m or 1.3b; empty: all, one after the other."""
    steps: int = 40
    """Timed steps a turn, behind five more."""
    turns: int = 2
    """Turns of each contestant, every other one in reverse order."""
    torch_python: str = ""
    """An interpreter that has torch; empty: this one."""
    write: bool = True
    """Write benchmarks/results/train_gpu_PART.json (train_gpu_compiled.json)."""


def gpu_name() -> str | None:
    """Of the first GPU; None without one. Asked of the driver: jax would start it."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True)
    names = done.stdout.strip().splitlines()
    return names[0] if done.returncode == 0 and names else None


def compile_for_h200(shape: Shape) -> dict[str, float]:
    """Compile the engine's step for one H200 that is not here."""
    rows = jax.ShapeDtypeStruct((shape.batch, shape.length + 1), jnp.int32)
    mesh = make_mesh(MeshShape(), gpu_devices("h200", 1, 1))
    began = time.perf_counter()
    engine = make_engine(shape, sample_batch={"tokens": rows}, mesh=mesh)
    memory = read_program(engine.lower().compile(), mesh).memory
    return {
        "compiled_in_seconds": time.perf_counter() - began,
        "state_and_batch_gb": memory.arguments / 1e9,
        "temporaries_gb": memory.temporaries / 1e9,
        "predicted_peak_gb": memory.peak / 1e9,
    }


def commands_of(part: str, config: Config) -> dict[str, list[str]]:
    """Contestant -> its command."""
    torch = config.torch_python or sys.executable
    return {
        "jaxpar": [sys.executable, str(HERE / "jaxpar_gpt.py"), part, "1", "0"],
        "JAX by hand": [sys.executable, str(HERE / "plain_gpt.py"), part],
        "torch compile": [torch, str(HERE / "torch_gpt.py"), part, "compile"],
    }


def take_turn(command: list[str], steps: int, cache: str) -> dict:
    """Start a contestant, let it take its steps, and end it."""
    environment = {
        "JAX_COMPILATION_CACHE_DIR": f"{cache}/jax",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/torch",
    }
    contestant = Contestant([command], environment)
    try:
        versions = contestant.read()["versions"]
        return contestant.take(5, steps) | {"versions": versions}
    finally:
        contestant.stop()


def take_turns(
    part: str, config: Config, console: Console
) -> tuple[dict[str, list[dict]], dict[str, str]]:
    """Contestant -> its answers; and the versions of what is not ours."""
    commands = commands_of(part, config)
    answers: dict[str, list[dict]] = {name: [] for name in commands}
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as cache:
        for turn in range(config.turns):
            for name in list(commands)[:: -1 if turn % 2 else 1]:
                try:
                    answer = take_turn(commands[name], config.steps, cache)
                except RuntimeError as error:
                    console.print(f"left out: {part}, {name}: {error}")
                    continue
                answers[name].append(answer)
                versions |= answer["versions"]
                console.print(f"turn {turn + 1} of {config.turns}: {part}, {name}")
    return {name: found for name, found in answers.items() if found}, versions


def measure(part: str, config: Config, gpu: str, console: Console) -> None:
    """Let all contestants take their turns, then print and write."""
    shape = SHAPES[part]
    answers, versions = take_turns(part, config, console)
    peak = next((rate for kind, rate in PEAK_FLOPS.items() if kind in gpu), None)
    rows = {name: summary(shape, found, peak) for name, found in answers.items()}
    columns = ["tokens_per_second", "mfu", "peak_gb", "predicted_peak_gb", "last_loss"]
    table = Table(f"{part} on {gpu}", *columns)
    for name, row in rows.items():
        cells = (f"{row[key]:,.3f}" if key in row else "" for key in columns)
        table.add_row(name, *cells)
    console.print(table)
    console.print(f"MFU = {MFU_FORMULA}, {shape.num_params:,} parameters")
    for name, mark in (("JAX by hand", 0.99), ("torch compile", 1.0)):
        if "jaxpar" in rows and name in rows:
            rate = rows["jaxpar"]["tokens_per_second"]
            ratio = rate / rows[name]["tokens_per_second"]
            console.print(f"jaxpar / {name}: {ratio:.3f} (mark {mark})")
    if config.write:
        measured = {
            "gpu": gpu,
            "shape": dataclasses.asdict(shape),
            "mfu_formula": MFU_FORMULA,
            "peak_flops": peak,
            "contestants": rows,
            "others": versions,
        }
        name = write_result(f"train_gpu_{part}", measured).name
        console.print(f"written: {name}")


def summary(shape: Shape, answers: list[dict], peak: float | None) -> dict[str, float]:
    """One contestant's means over its turns."""
    seconds = [answer["seconds_per_step"] for answer in answers]
    rate = shape.tokens / statistics.mean(seconds)
    row = {"tokens_per_second": rate, "last_loss": answers[-1]["losses"][-1]}
    if peak is not None:
        row["mfu"] = rate * shape.flops_per_token / peak
    for key, name in (
        ("peak_bytes", "peak_gb"),
        ("predicted_bytes", "predicted_peak_gb"),
    ):
        if key in answers[-1]:
            row[name] = answers[-1][key] / 1e9
    return row


def main(config: Config) -> None:
    """Measure where there is a GPU; compile where there is none."""
    console = Console()
    if config.part and config.part not in PARTS:
        raise SystemExit(f"--part {config.part}: must be one of {', '.join(PARTS)}.")
    parts = [config.part] if config.part else PARTS
    gpu = gpu_name()
    if gpu is not None:
        # This process asks for the GPU too, to write down which it was.
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        for part in parts:
            measure(part, config, gpu, console)
        return
    prepare_process()
    console.print("No GPU here: nothing is measured; compiling for an H200 instead.")
    compiled = {}
    for part in parts:
        compiled[part] = compile_for_h200(SHAPES[part])
        console.print(f"compiled: {part}")
    table = Table("one H200", *next(iter(compiled.values())))
    for part, row in compiled.items():
        table.add_row(part, *(f"{number:.2f}" for number in row.values()))
    console.print(table)
    if config.write:
        console.print(f"written: {write_result('train_gpu_compiled', compiled).name}")


if __name__ == "__main__":
    main(parse(Config, __doc__))
