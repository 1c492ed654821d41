"""Folders of runs made by hand, for tests of how runs are shown."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

BEGAN = 1_800_000_000.0
SECONDS = {"start": 9.0, "compile": 20.0, "step": 60.0, "save": 4.0, "evaluate": 7.0}


def write_run(
    folder: Path,
    records: Iterable[dict[str, Any]] = (),
    *,
    events: Iterable[dict[str, Any]] = (),
    accounts: list[dict[str, Any]] | None = None,
    config: dict[str, Any] | None = None,
    **fields: Any,
) -> Path:
    """Write the files of a run, as the loop does."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "config": config or {"model": "tiny", "steps": 200, "mesh": {"data": 4}},
        "identity": {"corpus_sha256": "8de1"},
        "versions": {"python": "3.13.0", "jax": "0.11.2"},
        "command": ["recipes/pretrain.py", "--model", "tiny"],
        "commit": "67e4419466de",
        **fields,
    }
    (folder / "run.json").write_text(json.dumps(record))
    write_lines(folder / "metrics.jsonl", records)
    write_lines(folder / "events.jsonl", events)
    (folder / "goodput.json").write_text(json.dumps(accounts or []))
    return folder


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def account(
    began: float = BEGAN, resumed: int = 0, step: int = 200, **seconds: float
) -> dict[str, Any]:
    """One start's account."""
    spent = SECONDS | seconds
    ended = began + sum(spent.values())
    return {
        "began": began,
        "ended": ended,
        "seconds": spent,
        "resumed": resumed,
        "step": step,
        "marks": [[resumed, 0.0], [step, spent["step"]]],
    }


def records(
    steps: int = 200, seed: int = 0, every: int = 20, slow: float = 1.0
) -> Iterable[dict[str, Any]]:
    """A run's metrics: of four workers, with an evaluation and two user's metrics."""
    rng, now = np.random.default_rng(seed), BEGAN
    for step in range(1, steps + 1):
        share = step / steps
        seconds = slow * (0.3 + 0.02 * rng.random())
        now += seconds
        record = {
            "step": step,
            "time": now,
            "train/loss": 2.4 + 3 * np.exp(-9 * share) + 0.12 * rng.normal(),
            "train/grad_norm": 0.5 + 6 * np.exp(-30 * share) + 0.2 * rng.random(),
            "train/learning_rate": 5e-3 * min(10 * share, 1.1 * (1 - share)),
            "train/loss_scale": 1.0,
            "train/skipped": 0.0,
            "train/accuracy": 0.5 * share + 0.02 * rng.normal(),
            "perf/tokens_per_second": 8192 / seconds,
            "perf/step_seconds": seconds,
            "perf/data_seconds": 0.002 * rng.random(),
            "perf/mfu": 0.42 / slow,
            "perf/memory_gb": 61.0 + 2 * share,
        }
        if step % 4 == 0:
            for name, usual in (("step_seconds", seconds), ("memory_gb", 62.0)):
                for word, times in (("min", 0.9), ("median", 1.0), ("max", 1.2)):
                    record[f"workers/{name}_{word}"] = usual * times
        if step % every == 0:
            record["eval/loss"] = 2.5 + 3 * np.exp(-8 * share)
            record["eval/code/accuracy"] = 0.4 * share
        yield record


EVENTS = (
    {"event": "skipped", "step": 61, "time": BEGAN + 30, "loss": "nan", "batch": 60},
    {"event": "bad", "step": 63, "time": BEGAN + 31, "why": "3 steps without numbers"},
    {"event": "rolled back", "step": 60, "time": BEGAN + 32, "left_out": [60, 61, 62]},
    {"event": "slow", "step": 100, "time": BEGAN + 60, "worker": 3, "why": "its data"},
)
HISTORY = [
    {
        "step": 120,
        "time": "2027-01-15T08:10:00+00:00",
        "changed": {"steps": [150, 200], "mesh": [{"data": 2}, {"data": 4}]},
    }
]
PLAN = {
    "target": "h200:1x8",
    "num_devices": 8,
    "bytes_per_device": {"peak": 60 * 10**9},
    "estimate": {"step_seconds": 0.28, "mfu": 0.45, "tokens_per_second": 29_000.0},
}


def write_full_run(folder: Path, **options: Any) -> Path:
    """A finished run with everything in its folder but checkpoints."""
    write_run(
        folder,
        records(**options),
        events=EVENTS,
        accounts=[account(step=130), account(BEGAN + 200, resumed=120, end=0.0)],
        history=HISTORY,
    )
    (folder / "plan.json").write_text(json.dumps(PLAN))
    (folder / "sample.txt").write_text("def f(x):\n    return x < 1 & x\n")
    return folder
