"""Public names, each with the module that it is loaded from when it is first used."""

from .schedules.asynchronous import PipeDream2BW, PipeMare

__all__ = ["PipeDream2BW", "PipeMare"]
