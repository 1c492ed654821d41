"""What belongs to one run: its folder, and what it must have in common with a resume.

``run.json`` records config, data identity and versions at the first start. A folder
that holds another run is refused, and nothing in it is touched.
"""

import dataclasses
import json
import os
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jaxpar.checkpoint.processes import from_first
from jaxpar.engine import Engine
from jaxpar.types import Batch

_FILE = "run.json"


def open_run(
    folder: str | os.PathLike[str], config: Any, identity: Mapping[str, Any]
) -> Path:
    """Start a run in a folder, or find that it is the one to resume.

    Args:
      folder: where everything that the run writes goes; made if missing.
      config: the run's config, a dataclass of JSON values.
      identity: what else must be the same to resume (the corpus's sha256).

    Returns:
      The folder.

    Raises:
      ValueError: if the folder holds another run, or files but no run, or is a file.
    """
    wanted = json.loads(
        json.dumps({"config": dataclasses.asdict(config), "identity": dict(identity)})
    )
    return Path(from_first(lambda: _claim(Path(folder), wanted)))


def _claim(folder: Path, wanted: Mapping[str, Any]) -> str:
    """Find or write the run's record; called on process 0 only."""
    record = folder / _FILE
    if record.exists():
        found = json.loads(record.read_text(encoding="utf-8"))
        differing = _differences(found, wanted)
        if differing:
            raise ValueError(
                f"out={str(folder)!r} holds another run: {'; '.join(differing)}. "
                "Choose another folder (--out), or the same settings to resume it."
            )
        return str(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(
            f"out={str(folder)!r} is a file. Choose an empty or a new folder (--out)."
        )
    unfinished = record.with_suffix(".tmp")
    if folder.exists() and set(folder.iterdir()) - {unfinished}:
        raise ValueError(
            f"out={str(folder)!r} has files but no {_FILE}, so it is no run of ours. "
            "Choose an empty or a new folder (--out)."
        )
    folder.mkdir(parents=True, exist_ok=True)
    versions = {"python": platform.python_version()} | {
        name: metadata.version(name) for name in ("jax", "flax", "optax")
    }
    text = json.dumps({**wanted, "versions": versions}, indent=2) + "\n"
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(record)
    return str(folder)


def mean_loss(engine: Engine, batches: Iterable[Batch]) -> float:
    """Evaluate on several batches: sum(total) / sum(weight) over all of them.

    Args:
      engine: the engine.
      batches: each as `Engine.evaluate` takes it; at least one.

    Returns:
      The mean loss.
    """
    metrics = jax.device_get([engine.evaluate(batch) for batch in batches])
    weights = [float(each["weight"]) for each in metrics]
    totals = [
        float(each["loss"]) * weight
        for each, weight in zip(metrics, weights, strict=True)
    ]
    return sum(totals) / sum(weights)


def _differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What differs in config and identity, as ``name: there, here``."""
    lines = []
    for part in ("config", "identity"):
        there, here = found.get(part, {}), wanted[part]
        for name in sorted(there.keys() | here.keys()):
            if there.get(name) != here.get(name):
                lines.append(
                    f"{name} is {there.get(name)!r} there, {here.get(name)!r} here"
                )
    return lines
