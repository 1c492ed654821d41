"""How fast are the Pallas kernels, beside cuDNN, XLA and torch?"""

import functools
import itertools

import jax.numpy as jnp

from benchmarks.gpu.session import Rows, Session
from benchmarks.kernels import attention, optimizers
from benchmarks.kernels.timing import copy_bandwidth, seconds
from benchmarks.kernels.torch_side import of_torch
from kernels_pallas.sign_bits import COLUMNS, pack, pack_mean

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


def sign_case(session: Session, workers: int) -> Rows:
    """Signs of a leaf, packed and averaged in plain JAX and by kernels; a row each.

    Args:
      session: where it runs.
      workers: whose bits are averaged; a power of two.
    """
    rounds, size = (1, 1 << 20) if session.dry else (ROUNDS, 1 << 28)
    bandwidth = copy_bandwidth(rounds, size)
    yield "copy", {"gb_per_second": bandwidth / 1e9}
    x, mask = jnp.ones(size), jnp.ones(size, jnp.uint8)
    bits, scales = jnp.ones((workers, size // 8), jnp.uint8), jnp.ones(workers)
    passes = {
        "pack": (functools.partial(pack, columns=COLUMNS), (x, x, mask), 13.125),
        f"mean of {workers}": (
            functools.partial(pack_mean, columns=COLUMNS // workers),
            (bits, scales, x, mask),
            9.125 + workers / 8,
        ),
    }
    kinds = ("reference",) if session.dry else ("reference", "mosaic")
    for (name, (call, args, num_bytes)), kind in itertools.product(
        passes.items(), kinds
    ):
        run = functools.partial(call, implementation=kind)
        taken = seconds(run, args, rounds)
        found = {"ms": 1e3 * taken, "gb_per_second": num_bytes * size / taken / 1e9}
        found["of_copy_bandwidth"] = found["gb_per_second"] * 1e9 / bandwidth
        yield f"{name}, {kind}", found
