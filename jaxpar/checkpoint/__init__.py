"""Checkpoints of sharded training states."""

from jaxpar.checkpoint.manifest import DamagedError
from jaxpar.checkpoint.restoring import Restored
from jaxpar.checkpoint.retention import Keep
from jaxpar.checkpoint.store import Checkpoints, SaveFailedError

__all__ = ["Checkpoints", "DamagedError", "Keep", "Restored", "SaveFailedError"]
