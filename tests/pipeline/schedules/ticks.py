"""In which ticks is a table of work busy?"""

from jaxpar.pipeline.schedules.table import IDLE


def busy_ticks(slots) -> list[int]:
    """The ticks in which some stage does this work."""
    return [tick for tick in range(len(slots)) if (slots[tick, ..., 0] != IDLE).any()]
