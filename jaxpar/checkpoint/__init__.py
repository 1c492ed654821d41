"""Checkpoints of sharded training states."""

from jaxpar.checkpoint.store import Checkpoints, Restored

__all__ = ["Checkpoints", "Restored"]
