"""Checkpoints of sharded training states."""

from jaxpar.checkpoint.manifest import DamagedError
from jaxpar.checkpoint.memory_tier import MemoryTier
from jaxpar.checkpoint.restoring import Restored
from jaxpar.checkpoint.retention import Keep
from jaxpar.checkpoint.store import Checkpoints, SaveFailedError
from jaxpar.lazy import load_modules

__all__ = [
    "Checkpoints",
    "DamagedError",
    "Keep",
    "MemoryTier",
    "Restored",
    "SaveFailedError",
]

load_modules(globals())
