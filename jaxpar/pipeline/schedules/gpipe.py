"""GPipe: all forwards, then all backwards; every stage holds all micro-batches.

Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism" (2019).
"""

from jaxpar.pipeline.schedules.table import Schedule, empty


def make_gpipe(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Make M + P - 1 ticks of forwards, then as many of backwards.

    Several chunks are run as an interleaved schedule runs them, in groups of P.

    Args:
      num_stages: P, at least 1.
      num_microbatches: M, at least 1.
      num_chunks: v, at least 1.

    Returns:
      The schedule.
    """
    P, M, v = num_stages, num_microbatches, num_chunks
    last_group, last = divmod(M - 1, P)
    half = last_group * v * P + last + v * P
    forward, backward = empty(2 * half, P), empty(2 * half, P)
    for m in range(M):
        group, rank = divmod(m, P)
        for chunk in range(v):
            first = group * v * P + rank
            for s in range(P):
                forward[first + chunk * P + s, s] = m, chunk
                turn = half + first + (v - 1 - chunk) * P
                backward[turn + P - 1 - s, s] = m, chunk
    return Schedule("gpipe", P, M, v, forward, backward, empty(2 * half, P, 0))
