"""GPipe: all forwards, then all backwards; every stage holds all micro-batches.

Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism" (2019).
"""

from jaxpar.pipeline.schedules.table import Schedule, empty


def make_gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """Make M + P - 1 ticks of forwards, then as many of backwards.

    Args:
      num_stages: P, at least 1.
      num_microbatches: M, at least 1.

    Returns:
      The schedule, of one chunk a stage.
    """
    P, M = num_stages, num_microbatches
    half = M + P - 1
    forward, backward = empty(2 * half, P), empty(2 * half, P)
    for m in range(M):
        for s in range(P):
            forward[m + s, s] = m, 0
            backward[half + m + P - 1 - s, s] = m, 0
    return Schedule("gpipe", P, M, 1, forward, backward, empty(2 * half, P, 0))
