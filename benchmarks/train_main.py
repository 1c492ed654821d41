"""How well does the main run learn: seconds, held-out loss and sample over seeds.

Starts ``recipes/pretrain.py`` as users do, once for each seed, one after the other. A
line of the sample counts as Python if `tokenize` accepts it alone; blank lines, the
first (it ends the prompt's line) and the last (it is cut) do not count.

    python benchmarks/train_main.py
"""

import dataclasses
import io
import re
import subprocess
import sys
import tempfile
import time
import tokenize
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.record import write_result
from jaxpar.cli.recipe_flags import parse
from jaxpar.data import stdlib_source

ROOT = Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Config:
    """Which runs."""

    seeds: int = 5
    """Runs, with seeds from 0."""
    flags: tuple[str, ...] = ()
    """More flags of the recipe, such as --flags=--steps=8."""


def is_python(line: str) -> bool:
    """Whether a line by itself is made of Python's tokens."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(f"{line}\n").readline))
    except (tokenize.TokenError, SyntaxError):
        return False
    return all(token.type != tokenize.ERRORTOKEN for token in tokens)


def count_lines(text: str) -> tuple[int, int]:
    """Full lines that are Python, and full lines."""
    lines = [line for line in text.split("\n")[1:-1] if line.strip()]
    return sum(map(is_python, lines)), len(lines)


def run(seed: int, flags: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """Train with a seed, and read what the recipe prints."""
    command = [
        sys.executable,
        str(ROOT / "recipes/pretrain.py"),
        f"--out={folder / 'run'}",
    ]
    began = time.perf_counter()
    done = subprocess.run(
        [*command, f"--seed={seed}", *flags],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=ROOT,
    )
    seconds = time.perf_counter() - began
    (loss,) = re.findall(r"held-out (\S+) nats a byte", done.stdout)
    (sample,) = re.findall(r"by the model ─+\n(.*)\n─+\n", done.stdout, re.DOTALL)
    good, lines = count_lines(sample)
    return {
        "seed": seed,
        "seconds": seconds,
        "heldout_nats_per_byte": float(loss),
        "lines": lines,
        "python_lines": good,
        "sample": sample,
    }


def main(config: Config) -> None:
    """Run every seed; print and record."""
    console = Console()
    runs = []
    for seed in range(config.seeds):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(run(seed, config.flags, Path(folder)))
        console.print(f"seed {seed}: {runs[-1]['seconds']:.0f} s")
    _, heldout = stdlib_source()
    good, lines = count_lines(heldout.array.tobytes().decode(errors="replace"))
    table = Table("seed", "s", "held-out, nats a byte", "lines", "Python")
    for each in runs:
        table.add_row(
            str(each["seed"]),
            f"{each['seconds']:.0f}",
            f"{each['heldout_nats_per_byte']:.3f}",
            str(each["lines"]),
            f"{each['python_lines'] / each['lines']:.0%}",
        )
    python = sum(each["python_lines"] for each in runs)
    of = sum(each["lines"] for each in runs)
    table.add_row("all", "", "", str(of), f"{python / of:.0%}")
    table.add_row(
        "the held-out files themselves", "", "", str(lines), f"{good / lines:.0%}"
    )
    console.print(table)
    measured = {"runs": runs, "heldout_files_python_lines": good / lines}
    console.print(str(write_result("train_main", measured)), soft_wrap=True)


if __name__ == "__main__":
    main(parse(Config, __doc__))
