"""How well and how fast does nanoGPT's CPU setting train, by nanoGPT and by jaxpar?

Its README's character setting: 4 layers, width 128, blocks of 64, batch 12, 2,001
updates, AdamW. Runs take turns. Both models are scored by one function, on the logits
of all held-out windows; the text is named by its hash. nanoGPT is a checkout of
karpathy/nanoGPT; the text is one file, the last tenth of which is held out.

    python benchmarks/nano_gpt.py --nanogpt ../nanoGPT --text ../input.txt \
        --torch-python ../torch/bin/python
"""

import dataclasses
import hashlib
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contestants.runner import HERE
from benchmarks.record import write_result
from jaxpar.cli.recipe_flags import parse

LENGTH, FIRST = 64, 50
"""Tokens of a window; steps that are not timed."""
FLAGS = {
    **{"device": "cpu", "compile": False, "dtype": "float32", "dataset": "text"},
    **{"eval_iters": 1, "log_interval": 1, "block_size": LENGTH, "batch_size": 12},
    **{"n_layer": 4, "n_head": 4, "n_embd": 128, "dropout": 0.0, "beta2": 0.99},
    **{"gradient_accumulation_steps": 1, "learning_rate": 1e-3, "min_lr": 1e-4},
    **{"warmup_iters": 100, "always_save_checkpoint": True, "out_dir": "out"},
}


@dataclasses.dataclass(frozen=True)
class Config:
    """What takes part, and how often."""

    nanogpt: str = "../nanoGPT"
    """A checkout of karpathy/nanoGPT."""
    text: str = "../input.txt"
    """The text: tiny Shakespeare, or a file of its size."""
    torch_python: str = ""
    """An interpreter that has torch; empty: this one."""
    steps: int = 2000
    """Of nanoGPT's README; it takes one update more."""
    rounds: int = 3
    """Runs of each, in turns, with seeds 0, 1 and so on over their own."""
    write: bool = True
    """Write benchmarks/results/nano_gpt.json."""


def prepare(config: Config, folder: Path) -> str:
    """Write the text as nanoGPT's prepare.py does, and the windows; its hash."""
    raw = Path(config.text).read_bytes()
    text = raw.decode("utf-8")
    chars = sorted(set(text))
    numbers = {char: number for number, char in enumerate(chars)}
    ids = np.array([numbers[char] for char in text], np.uint16)
    cut = int(len(ids) * 0.9)
    data = folder / "data" / "text"
    data.mkdir(parents=True)
    ids[:cut].tofile(data / "train.bin")
    ids[cut:].tofile(data / "val.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(chars)}))
    np.save(folder / "train.npy", ids[:cut])
    held = ids[cut:]
    starts = range(0, len(held) - LENGTH, LENGTH)
    windows = np.stack([held[start : start + LENGTH + 1] for start in starts])
    np.save(folder / "windows.npy", windows)
    for name in ("model.py", "configurator.py"):
        shutil.copy(Path(config.nanogpt) / name, folder / name)
    return hashlib.sha256(raw).hexdigest()


def run(command: list[str], folder: Path) -> str:
    """A command's output; its last words where it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return done.stdout


def theirs(config: Config, folder: Path, seed: int) -> tuple[list[float], np.ndarray]:
    """Times of the steps and logits, by nanoGPT, with another seed than its own."""
    program = (Path(config.nanogpt) / "train.py").read_text(encoding="utf-8")
    program = program.replace("manual_seed(1337 ", f"manual_seed({1337 + seed} ")
    (folder / "train.py").write_text(program, encoding="utf-8")
    python = config.torch_python or sys.executable
    steps = config.steps
    how = FLAGS | {"max_iters": steps, "lr_decay_iters": steps, "eval_interval": steps}
    flags = [f"--{name}={value}" for name, value in how.items()]
    said = run([python, "train.py", *flags], folder)
    times = [float(x) for x in re.findall(r"time ([\d.]+)ms", said)]
    files = [str(folder), "out/ckpt.pt", "windows.npy", "theirs.npy"]
    run([python, str(HERE / "torch_nano_logits.py"), *files], folder)
    return times[:-1], np.load(folder / "theirs.npy")  # The last one evaluates too.


def ours(config: Config, folder: Path, seed: int) -> tuple[list[float], np.ndarray]:
    """Times of the steps and logits, by jaxpar."""
    files = ["train.npy", "windows.npy", "ours.npy", str(seed), str(config.steps + 1)]
    said = run([sys.executable, str(HERE / "jaxpar_nano.py"), *files], folder)
    return [float(x) for x in said.split()], np.load(folder / "ours.npy")


def score(logits_NTV: np.ndarray, windows: np.ndarray) -> float:
    """The mean cross entropy, nats a character, fp64."""
    logits = logits_NTV.astype(np.float64)
    targets = windows[:, 1:].astype(int)[..., None]
    top = logits.max(-1, keepdims=True)
    total = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return float((total - np.take_along_axis(logits, targets, -1)).mean())


def main(config: Config) -> None:
    """Train both in turns, and write what came of it."""
    console, found = Console(), {"nanoGPT": [], "jaxpar": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sha256 = prepare(config, folder)
        windows = np.load(folder / "windows.npy")
        console.print(f"text {sha256}, {len(windows):,} held-out windows")
        for seed in range(config.rounds):
            # One after the other, so that what the machine does falls on both.
            for name, train in (("nanoGPT", theirs), ("jaxpar", ours)):
                times, logits = train(config, folder, seed)
                own = {
                    "heldout_nats": score(logits, windows),
                    "milliseconds_per_step": statistics.median(times[FIRST:]),
                }
                found[name].append(own)
                console.print(f"round {seed + 1}: {name} {own}")
    table = Table("", "held out, nats a character", "mean", "ms a step", "median")
    for name, runs in found.items():
        nats, times = ([own[key] for own in runs] for key in runs[0])
        means = f"{statistics.mean(nats):.4f}", f"{statistics.median(times):.1f}"
        each = " ".join(f"{x:.4f}" for x in nats), " ".join(f"{x:.1f}" for x in times)
        table.add_row(name, each[0], means[0], each[1], means[1])
    console.print(table)
    if config.write:
        measured = {"text_sha256": sha256, "steps": config.steps + 1, "runs": found}
        console.print(f"written: {write_result('nano_gpt', measured).name}")


if __name__ == "__main__":
    main(parse(Config, __doc__))
