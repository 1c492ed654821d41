"""Do decoders with experts train on any mesh as on one device?

SGD with momentum; losses to 1e-6 and parameters to 1e-5, relative, over three steps.
With capacity the routing groups are rows, on any mesh the same.
"""

import functools
from typing import Any

import optax
import pytest

from jaxpar.models.experts.config import ExpertsConfig
from tests.equivalence import problems
from tests.equivalence.looped_gpt import train

FAMILIES: dict[str, ExpertsConfig] = {
    "all": ExpertsConfig(num=4, balance_loss=0.1, router_z_loss=0.01),
    "shared": ExpertsConfig(
        num=4, every=2, normalise_gates=False, shared_width=24, shared_gate=True
    ),
    "capacity": ExpertsConfig(num=4, capacity_factor=0.75, balance_loss=0.1),
    "pairs": ExpertsConfig(num=4, capacity_factor=0.5, group_rows=2, top_k=3),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all-zero3-e2-t2": ("all", {"zero": 3, "data": 2, "expert": 2, "tensor": 2}),
    "all-zero0-e4": ("all", {"zero": 0, "data": 1, "expert": 4}),
    "all-zero1-d4-t2": ("all", {"zero": 1, "data": 4, "tensor": 2}),
    "all-zero2-accumulate": (
        "all",
        {"zero": 2, "data": 2, "expert": 2, "accumulate": 2},
    ),
    "all-sequence": (
        "all",
        {"data": 2, "expert": 2, "tensor": 2, "sequence_parallel": True},
    ),
    "all-pipe2-e2-t2": (
        "all",
        {"data": 1, "pipe": 2, "expert": 2, "tensor": 2, "accumulate": 2},
    ),
    "shared-zero3-e2": ("shared", {"zero": 3, "data": 2, "expert": 2}),
    "shared-pipe2": ("shared", {"data": 2, "pipe": 2, "accumulate": 2}),
    "capacity-zero3-e2-t2": (
        "capacity",
        {"zero": 3, "data": 2, "expert": 2, "tensor": 2},
    ),
    "capacity-r2-e4": ("capacity", {"data": 1, "replica": 2, "expert": 4}),
    "capacity-pipe2-e2": (
        "capacity",
        {"data": 2, "pipe": 2, "expert": 2, "accumulate": 2, "remat": "full"},
    ),
    "pairs-zero3-e2": ("pairs", {"zero": 3, "data": 2, "expert": 2}),
}
SGD = optax.sgd(0.3, momentum=0.9)
QUICK = ("all-zero3-e2-t2",)


def run(family: str, **case: Any) -> tuple[list[float], Any]:
    own = {"num_layers": 4, "width": 32, "optimizer": SGD, "bias": False}
    return train(**{**own, "experts": FAMILIES[family], **case})


@functools.cache
def on_one_device(family: str, accumulate: int) -> Any:
    return run(family, data=1, accumulate=accumulate)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough)
        for name in CASES
    ],
)
def test_any_mesh_trains_as_one_device_does(name: str) -> None:
    family, case = CASES[name]
    right = on_one_device(family, case.get("accumulate", 1))
    losses, params = run(family, **case)
    assert losses == pytest.approx(right[0], rel=1e-6)
    assert problems.distance(params, right[1]) <= 1e-5
