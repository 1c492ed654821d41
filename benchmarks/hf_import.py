"""How long does it take to import 2 GB of safetensors, beside torch?

A random Llama in bf16, in two files, read into fp32 with matrices transposed: by torch
and safetensors, tensor by tensor, and by jaxpar onto one CPU device. Both in turns, in
processes of their own, from files that are in memory already. Run it with an
interpreter that has jaxpar and torch (`jaxpar[oracle]`).

    python benchmarks/hf_import.py
"""

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contestants.runner import HERE
from benchmarks.record import write_result
from jaxpar.cli.recipe_flags import parse

FIELDS = {
    **{"vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632},
    **{"num_hidden_layers": 20, "num_attention_heads": 16, "num_key_value_heads": 16},
}


@dataclasses.dataclass(frozen=True)
class Config:
    """How large, and how often."""

    layers: int = 18
    """Of the Llama; 18 make 2.1 GB."""
    rounds: int = 5
    """Runs of each, in turns; the median counts."""
    write: bool = True
    """Write benchmarks/results/hf_import.json."""


def write_model(folder: Path, layers: int) -> int:
    """Write the Llama; the bytes of its files."""
    command = [sys.executable, str(HERE / "torch_model.py"), str(folder)]
    fields = json.dumps(FIELDS | {"num_hidden_layers": layers})
    subprocess.run([*command, "Llama", fields], check=True, capture_output=True)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def main(config: Config) -> None:
    """Import in turns and write the medians."""
    console = Console()
    found: dict[str, list[dict[str, float]]] = {"torch": [], "jaxpar": []}
    with tempfile.TemporaryDirectory() as folder:
        size = write_model(Path(folder), config.layers)
        for _ in range(config.rounds):
            for name, runs in found.items():
                script = str(HERE / f"{name}_import.py")
                command = [sys.executable, script, folder]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(done.stderr[-2000:])
                runs.append(json.loads(done.stdout.strip().splitlines()[-1]))
                console.print(f"{name}: {runs[-1]}")
    table = Table(f"import of {size / 1e9:.2f} GB", "seconds", "MB beside the result")
    measured: dict[str, Any] = {"gigabytes": size / 1e9}
    for name, runs in found.items():
        medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        measured[name] = medians
        table.add_row(
            name, f"{medians['seconds']:.2f}", f"{medians['beside'] / 1e6:.0f}"
        )
    console.print(table)
    if config.write:
        console.print(f"written: {write_result('hf_import', measured).name}")


if __name__ == "__main__":
    main(parse(Config, __doc__))
