"""Does a step whose loops gather a layer ahead train as one device does?

Tolerances as in test_zero.py: losses and parameters 1e-5, relative. Where nothing else
differs, gathering ahead changes no bit.
"""

from typing import Any

import jax
import numpy as np
import pytest

from tests.equivalence import problems
from tests.equivalence.looped_gpt import on_one_device, train

CASES: dict[str, dict[str, Any]] = {
    "zero3": {"zero": 3},
    "zero3-full-accumulate2": {"zero": 3, "remat": "full", "accumulate": 2},
    "zero1": {"zero": 1},
    "zero2-dots-tensor2": {"zero": 2, "remat": "dots", "tensor": 2},
    "zero3-tensor2-replica2": {"zero": 3, "tensor": 2, "data": 2, "replica": 2},
    "zero1-replica2-unroll2": {"zero": 1, "data": 2, "replica": 2, "unroll": 2},
    "zero3-names-sequence": {
        "zero": 3,
        "remat": "save-names",
        "remat_names": ("attention",),
        "tensor": 2,
        "sequence_parallel": True,
    },
    "zero2-accumulate2": {"zero": 2, "accumulate": 2},
    "zero3-dropout": {"zero": 3, "dropout": 0.1},
    "zero3-frozen": {"zero": 3, "trainable": ["*/bias", "*attention*", "embed/*"]},
}
QUICK = ("zero3-full-accumulate2", "zero1")


NAMED = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough)
    for name in CASES
]


@pytest.mark.parametrize("name", NAMED)
def test_gathering_ahead_trains_like_one_device(name: str) -> None:
    case = CASES[name]
    chosen = case.get("trainable")
    accumulate = case.get("accumulate", 1)
    right = on_one_device(
        case.get("dropout", 0.0), accumulate, chosen and tuple(chosen)
    )
    losses, params = train(prefetch=True, **case)
    assert losses == pytest.approx(right[0], rel=1e-5)
    assert problems.distance(params, right[1]) <= 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["zero3", "zero3-dropout", "zero3-tensor2-replica2"])
def test_gathering_ahead_changes_no_bit(name: str) -> None:
    found, right = (train(prefetch=ahead, **CASES[name]) for ahead in (True, False))
    assert found[0] == right[0]
    jax.tree.map(np.testing.assert_array_equal, found[1], right[1])
