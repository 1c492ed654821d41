"""What does the training step that GPUs are measured on hold, compiled for an H200?

GPT-2 of 124 and 350 million parameters and GPT-3's 1.3 billion, in bf16 on fp32 master
parameters, nothing recomputed. Needs no GPU: where one would run cuDNN's attention
stands a call of its size. `benchmarks/gpu_day.py` measures the same steps on a GPU.

    python benchmarks/train_gpu.py --part 124m
"""

import argparse
import sys
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
from benchmarks.record import write_result
from jaxpar.compiled.program import read_program
from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.planner.absent_devices import gpu_devices, prepare_process

PARTS = [name for name, shape in SHAPES.items() if shape.device == "gpu"]


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


def main() -> None:
    """Compile, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, help="one of them; by default all")
    asked = parser.parse_args()
    prepare_process()
    console = Console()
    compiled = {}
    for part in [asked.part] if asked.part else PARTS:
        compiled[part] = compile_for_h200(SHAPES[part])
        console.print(f"compiled: {part}")
    table = Table("one H200", *next(iter(compiled.values())))
    for part, row in compiled.items():
        table.add_row(part, *(f"{number:.2f}" for number in row.values()))
    console.print(table)
    if not asked.part:
        console.print(f"written: {write_result('train_gpu_compiled', compiled).name}")


if __name__ == "__main__":
    main()
