"""Saves of a tree, one after the other."""

from pathlib import Path
from typing import Any

from jaxpar.checkpoint import Checkpoints


def save(folder: Path, *steps: int, tree: dict[str, Any]) -> None:
    """Save a tree as these steps, and wait."""
    checkpoints = Checkpoints(folder)
    for step in steps:
        checkpoints.save(step, tree)
    checkpoints.close()
