"""How is a contestant asked for steps: a line with a number in, a line of JSON out.

Needs nothing but the standard library, so that a contestant can run in any environment.
"""

import json
import sys
import time
from collections.abc import Callable

BATCH, LENGTH, LAYERS, HEADS, WIDTH, VOCAB = 8, 256, 6, 6, 384, 256
"""A GPT of 10.8 million parameters: fp32, learned positions, tied embedding."""
LEARNING_RATE = 1e-3


def tokens(step: int) -> list[list[int]]:
    """Rows of bytes to train on, the same for every contestant."""
    # A linear congruential generator: no library's random numbers are needed.
    state, rows = 12345 + step, []
    for _ in range(BATCH):
        row = []
        for _ in range(LENGTH + 1):
            state = (1103515245 * state + 12345) % 2**31
            row.append((state >> 16) % 64)
        rows.append(row)
    return rows


def serve(step: Callable[[int], float], **versions: str) -> None:
    """Take steps as asked until input ends; `step` returns its loss when it is done."""
    taken = 0
    answer({"versions": versions})
    for line in sys.stdin:
        seconds, losses = [], []
        for _ in range(int(line)):
            began = time.perf_counter()
            losses.append(step(taken))
            seconds.append(time.perf_counter() - began)
            taken += 1
        answer({"seconds": seconds, "losses": losses})


def answer(value: dict) -> None:
    """Write one line of JSON, marked, for libraries print to the same place."""
    print("@@" + json.dumps(value), flush=True)
