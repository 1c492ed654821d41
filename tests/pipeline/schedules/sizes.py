"""Of which sizes are schedules built in the tests, and in which ticks do they work?"""

import numpy as np
from hypothesis import strategies as st

from jaxpar.pipeline.schedules.table import IDLE

stages = st.integers(1, 8)
microbatches = st.integers(1, 32)
chunks = st.integers(1, 4)


def busy_ticks(slots: np.ndarray) -> list[int]:
    """The ticks in which some stage does this work."""
    return [tick for tick in range(len(slots)) if (slots[tick, ..., 0] != IDLE).any()]
