"""How fast are the Pallas kernels, beside cuDNN, XLA and torch?"""

import itertools

from benchmarks.gpu.session import Rows, Session
from benchmarks.kernels import attention, optimizers
from benchmarks.kernels.timing import copy_bandwidth
from benchmarks.kernels.torch_side import of_torch

ROUNDS, HEAD_SIZE = 10, 128
TORCH_MINUTES = 2.5


def attention_case(session: Session, part: str, name: str) -> Rows:
    """One case of a part of `benchmarks.kernels.attention`.

    Args:
      session: where it runs.
      part: such as "window".
      name: of the case.
    """
    (case,) = (case for case in attention.cases_of(part) if case.name == name)
    size, rounds = (64, 1) if session.dry else (HEAD_SIZE, ROUNDS)
    # First: JAX keeps what it has taken of the memory.
    theirs = of_torch(
        session.torch_python,
        part,
        size=size,
        rounds=rounds,
        minutes=TORCH_MINUTES,
        names=(name,),
    )
    beside = theirs.get(name, {})
    on_gpu = not session.dry
    yield name, attention.measure(case, size, rounds, beside, on_gpu=on_gpu)


def optimizer_case(session: Session, model: str) -> Rows:
    """A step of each optimizer on a model's parameters; a row each."""
    rounds = 1 if session.dry else ROUNDS
    theirs = of_torch(
        session.torch_python,
        model,
        size=HEAD_SIZE,
        rounds=rounds,
        minutes=TORCH_MINUTES,
    )
    bandwidth = copy_bandwidth(rounds, 1 << (20 if session.dry else 28))
    yield "copy", {"gb_per_second": bandwidth / 1e9}
    implementation = "reference" if session.dry else "mosaic"
    measured = optimizers.measure(model, rounds, theirs, implementation)
    # One of each way: optax's, fused, fused in 8 bits.
    few = len(theirs) + 3 if session.dry else None
    for name, found in itertools.islice(measured, few):
        found["of_copy_bandwidth"] = found["gb_per_second"] * 1e9 / bandwidth
        yield name, found
