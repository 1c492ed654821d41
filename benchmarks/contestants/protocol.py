"""How is a contestant asked for steps: a line of numbers in, a line of JSON out.

Needs nothing but the standard library, so that a contestant can run in any environment.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Shape:
    """A GPT with learned positions and a tied embedding, and what it is trained on.

    On a GPU matrix products are in bf16, on fp32 master parameters.
    """

    batch: int
    length: int
    layers: int
    heads: int
    width: int
    vocab: int = 50_304
    device: str = "gpu"

    @property
    def tokens(self) -> int:
        """Trained on in a step."""
        return self.batch * self.length

    @property
    def num_params(self) -> int:
        """12 width^2 a layer, two tables, and the biases and norms."""
        layer = 12 * self.width**2 + 13 * self.width
        rows = self.vocab + self.length
        return self.layers * layer + rows * self.width + 2 * self.width

    @property
    def flops_per_token(self) -> int:
        """6 per parameter, and 12 per layer, feature and position of attention.

        The causal half is not taken off.

        Source: Chowdhery et al., "PaLM" (2022), appendix B.
        """
        return 6 * self.num_params + 2 * self.causal_attention_flops

    @property
    def causal_attention_flops(self) -> int:
        """Of a token: of the half of the scores that a causal mask leaves."""
        return 6 * self.layers * self.width * self.length


SHAPES = {
    "toy": Shape(2, 64, 2, 2, 64, vocab=256, device="cpu"),
    "nano": Shape(12, 64, 4, 4, 128, vocab=65, device="cpu"),
    "10.8m": Shape(8, 256, 6, 6, 384, vocab=256, device="cpu"),
    "124m": Shape(32, 1024, 12, 12, 768),
    "350m": Shape(16, 1024, 24, 16, 1024),
    "1.3b": Shape(8, 2048, 24, 16, 2048),
}
LEARNING_RATE = 1e-4
"""From the first step on. At 1e-3 a GPT of 124M becomes unstable where layers' outputs
begin small, as GPT-2's do, and its losses say nothing."""


def tokens(shape: Shape, step: int) -> list[list[int]]:
    """Rows of tokens to train on, the same for every contestant."""
    # A linear congruential generator: no library's random numbers are needed.
    state, rows = 12345 + step, []
    for _ in range(shape.batch):
        row = []
        for _ in range(shape.length + 1):
            state = (1103515245 * state + 12345) % 2**31
            row.append((state >> 16) % min(shape.vocab, 2**15))
        rows.append(row)
    return rows


def serve(
    step: Callable[[int], Any],
    report: Callable[[], dict[str, Any]] = dict,
    **versions: str,
) -> None:
    """Take steps as asked until input ends: "WARM TIMED" on a line.

    Args:
      step: begins step N and returns its loss, which is waited for when the next step
        has been begun, as in a run.
      report: what else goes into an answer.
      **versions: of what takes the steps.
    """
    taken = 0
    answer({"versions": versions})
    for line in sys.stdin:
        warm, timed = map(int, line.split())
        for _ in range(warm):
            float(step(taken))
            taken += 1
        seconds, losses = timed_steps(step, taken, timed)
        taken += timed
        answer({"seconds_per_step": seconds, "losses": losses} | report())


def timed_steps(
    step: Callable[[int], Any], first: int, steps: int
) -> tuple[float, list[float]]:
    """Seconds of a step and all losses, each read when the next step has begun."""
    began = time.perf_counter()
    losses, before = [], step(first)
    for number in range(first + 1, first + steps):
        loss = step(number)
        losses.append(float(before))
        before = loss
    losses.append(float(before))
    return (time.perf_counter() - began) / steps, losses


def answer(value: dict) -> None:
    """Write one line of JSON, marked, for libraries print to the same place."""
    print("@@" + json.dumps(value), flush=True)
