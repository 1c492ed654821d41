"""One forward and one backward a tick, on v chunks a stage: 1F1B is v = 1.

A stage holds v chunks of blocks, P virtual stages apart. Ticks are v times shorter, so
the bubble is 1/v of 1F1B's; activations are sent between stages v times as often.

Source: Narayanan et al., "PipeDream" (2019) and Fan et al., "DAPPLE" (2021), for 1F1B;
Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters"
(2021), section 2.2, for the interleaving. Differs: a tick holds a forward and a
backward, so no stage waits for a neighbour's longer backward; a stage stores up to
2 (P - s) - 1 inputs (v = 1) instead of P - s.
"""

from jaxpar.pipeline.schedules.table import Schedule, empty


def make_1f1b(num_stages: int, num_microbatches: int) -> Schedule:
    """Make M + 2 (P - 1) ticks; M + P - 1 of them have a forward.

    Args:
      num_stages: P, at least 1.
      num_microbatches: M, at least 1.

    Returns:
      The schedule, of one chunk a stage.
    """
    return make_in_groups("1f1b", num_stages, num_microbatches, 1)


def make_interleaved(
    num_stages: int, num_microbatches: int, num_chunks: int
) -> Schedule:
    """Make 1F1B's order on virtual stages, micro-batches in groups of P.

    Args:
      num_stages: P, at least 1.
      num_microbatches: M, a multiple of P if there is more than one chunk.
      num_chunks: v, at least 1.

    Returns:
      The schedule.

    Raises:
      ValueError: if P does not divide M.
    """
    P, M = num_stages, num_microbatches
    if num_chunks > 1 and M % P:
        below = M // P * P
        near = f"{below} or {below + P}" if below else f"{P}"
        raise ValueError(
            f"accumulate={M}: schedule='interleaved' takes micro-batches in groups of "
            f"pipe={P}; use a multiple, such as {near}, or schedule='1f1b', which "
            "takes any number."
        )
    return make_in_groups("interleaved", P, M, num_chunks)


def make_in_groups(name: str, P: int, M: int, v: int) -> Schedule:
    """Make the order for any M; an incomplete last group leaves ticks empty."""
    # The last virtual stage's first forward, with its backward in the same tick.
    turn = v * P - 1
    last_group, last = divmod(M - 1, P)
    num_ticks = turn + P + last_group * v * P + (v - 1) * P + last
    forward, backward = empty(num_ticks, P), empty(num_ticks, P)
    for m in range(M):
        group, rank = divmod(m, P)
        for chunk in range(v):
            first = group * v * P + rank
            for s in range(P):
                forward[first + chunk * P + s, s] = m, chunk
                backward[turn + first + (v - 1 - chunk) * P + P - 1 - s, s] = m, chunk
    return Schedule(name, P, M, v, forward, backward, empty(num_ticks, P, 0))
