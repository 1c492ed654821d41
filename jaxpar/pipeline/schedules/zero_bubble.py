"""1F1B with a split backward: deferred weight gradients fill the bubble.

A backward's first half computes the gradient of its input, which a neighbour needs; no
other stage needs the weight gradients of the second half.

Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 2.1, ZB-H1.
Differs: stages are synchronised by ticks (see
`jaxpar.pipeline.schedules.interleaved`).
"""

import numpy as np

from jaxpar.pipeline.schedules.interleaved import make_1f1b
from jaxpar.pipeline.schedules.table import IDLE, Schedule, empty

SLOTS = 2
"""Slots for weight gradients in a tick, on each stage."""


def make_zero_bubble(num_stages: int, num_microbatches: int) -> Schedule:
    """Make 1F1B's ticks, with weight gradients where a tick has idle time.

    The first stage has backwards until the last tick and computes its weight gradients
    at once, which sets the length of each tick. The other stages fill their idle time.

    Args:
      num_stages: P, at least 1.
      num_microbatches: M, at least 1.

    Returns:
      The schedule, of one chunk a stage.
    """
    base = make_1f1b(num_stages, num_microbatches)
    work = (base.forward[..., 0] != IDLE).astype(int)
    work += base.backward[..., 0] != IDLE
    at_once = work[:, 0] + (base.backward[:, 0, 0] != IDLE)
    length = np.maximum(work.max(axis=1), at_once)
    weight = empty(base.num_ticks, num_stages, SLOTS)
    for stage in range(num_stages):
        waiting: list[int] = []
        for tick in range(base.num_ticks):
            if base.backward[tick, stage, 0] != IDLE:
                waiting.append(int(base.backward[tick, stage, 0]))
            # Weight gradients that do not fit into later ticks have to be done now.
            room = length[tick] - work[tick, stage]
            behind = SLOTS * (base.num_ticks - 1 - tick)
            later = int((base.backward[tick + 1 :, stage, 0] != IDLE).sum())
            owed = len(waiting) + later - behind
            for slot in range(min(SLOTS, len(waiting), max(room, owed, 0))):
                weight[tick, stage, slot] = waiting.pop(0), 0
        assert not waiting
    return Schedule(
        "zero_bubble",
        num_stages,
        num_microbatches,
        1,
        base.forward,
        base.backward,
        weight,
    )
