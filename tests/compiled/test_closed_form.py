"""Is the budget by design the ZeRO table's, counted by hand?"""

import jax.numpy as jnp
import pytest

from jaxpar.compiled.budget import Budget
from jaxpar.compiled.closed_form import ClosedForm, closed_form_budget
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.sharding.zero import zero_stage
from jaxpar.step.precision import make_precision

SIZES = {"data": 4, "pipe": 1, "tensor": 2}
ACCUMULATE = 3


def plan(shape, placed, data_dim, pipe: int = 1) -> LeafSharding:
    sizes = SIZES | {"pipe": pipe}
    return LeafSharding("w", shape, (None,) * len(shape), data_dim, placed, sizes, "")


# What data moves of them, in elements: half a kernel, as tensor splits it; a bias that
# tensor leaves whole; a scale that data leaves whole.
PLANS = [
    plan((64, 32), ((), ("tensor",)), data_dim=0),
    plan((512,), ((),), data_dim=0),
    plan((6,), (("tensor",),), data_dim=None),
]
SPLIT, KEPT = 1024 + 512, 3
COMPUTED = 2048 + 512 + 6


def expected(zero: int, plans=PLANS, frozen=(), **change) -> Budget:
    right = {
        "zero": zero_stage(zero),
        "precision": make_precision("bf16", reduce_dtype="fp32"),
        "accumulate": ACCUMULATE,
        "sizes": SIZES,
        "platform": "gpu",
        "coupled": False,
    }
    form = ClosedForm(**(right | change))
    return closed_form_budget(plans, form, state_bytes=7, frozen=frozen)


@pytest.mark.parametrize(
    ("zero", "gathers", "reductions"), [(0, 0, 1), (1, 1, 1), (2, 1, 3), (3, 6, 3)]
)
def test_each_stage_gathers_in_bf16_and_reduces_in_fp32(zero, gathers, reductions):
    plans = PLANS
    if zero == 0:
        plans = [plan(p.shape, p.placed, data_dim=None) for p in PLANS]
    split, kept = (0, SPLIT + KEPT) if zero == 0 else (SPLIT, KEPT)
    named = {
        "all-gather": 2 * gathers * split,
        "reduce-scatter": 4 * reductions * split,
        "all-reduce": 4 * reductions * kept,
    }
    budget = expected(zero, plans)
    assert budget.communicated == {"data": {k: n for k, n in named.items() if n}}
    assert budget.state_bytes == 7
    assert budget.tolerance == 0.05
    assert budget.unbounded == ("pipe", "tensor")


@pytest.mark.parametrize(("zero", "gathers"), [(1, 1), (2, 1), (3, 6)])
def test_frozen_leaves_are_gathered_in_their_own_dtype_and_not_reduced(zero, gathers):
    """One byte an element in int8; fp32 in the compute dtype; one left whole, never."""
    dtypes = map(jnp.dtype, ("int8", "float32", "bfloat16"))
    budget = expected(zero, frozen=list(zip(PLANS, dtypes, strict=True)))
    plain = expected(zero).communicated["data"]
    more = gathers * (1024 + 2 * 512)
    assert budget.communicated == {
        "data": {**plain, "all-gather": plain["all-gather"] + more}
    }


@pytest.mark.parametrize(("zero", "gathers"), [(1, 1), (2, 1), (3, 1)])
def test_pipeline_gathers_and_reduces_once_at_every_stage(zero, gathers):
    plans = [plan((8, 64), (("pipe",), ("tensor",)), data_dim=1, pipe=2)]
    budget = expected(zero, plans, sizes={**SIZES, "pipe": 2})
    assert budget.communicated["data"] == {
        "all-gather": 2 * gathers * 128,
        "reduce-scatter": 4 * 128,
    }


@pytest.mark.parametrize(("zero", "gathers"), [(0, 0), (1, 1), (2, 1), (3, 6)])
def test_coupled_examples_reduce_every_micro_batch_and_the_largest_leaf_twice(
    zero, gathers
):
    """Where the gradients are made: whole over tensor, which splits them at rest."""
    budget = expected(zero, coupled=True)
    reduced = 2 * ACCUMULATE * (COMPUTED + 2048)
    named = {"all-gather": 2 * gathers * SPLIT, "reduction": reduced}
    assert budget.communicated == {"data": {k: n for k, n in named.items() if n}}
    assert budget.tolerance == 0.3


def test_what_the_compiler_places_in_a_pipeline_is_not_bounded():
    budget = expected(2, coupled=True, sizes={**SIZES, "pipe": 2})
    assert budget.unbounded == ("data", "pipe", "tensor")


def test_cpus_move_fp32_whatever_the_precision():
    half = make_precision("bf16")
    assert half.reduce_dtype == jnp.bfloat16
    budget = expected(1, precision=half, platform="cpu")
    assert budget.communicated["data"]["all-gather"] == 4 * SPLIT
    assert budget.communicated["data"]["reduction"] == 4 * (SPLIT + KEPT)
    on_gpu = expected(1, precision=half)
    assert on_gpu.communicated["data"]["reduce-scatter"] == 2 * SPLIT


def test_tpus_may_all_reduce_what_is_to_be_scattered():
    budget = expected(2, platform="tpu")
    reduced = 4 * ACCUMULATE * (SPLIT + KEPT)
    assert budget.communicated["data"] == {
        "all-gather": 2 * SPLIT,
        "reduction": reduced,
        "collective-permute": round(0.1 * reduced),
    }


def test_one_device_on_data_moves_nothing():
    assert expected(3, sizes={**SIZES, "data": 1}).communicated == {}


@pytest.mark.parametrize(("rows", "small"), [(64, 1 << 16), (10**6, 128_000)])
def test_small_is_a_thousandth_of_the_parameters_or_64_kib(rows, small):
    budget = expected(1, [plan((rows, 32), ((), ()), data_dim=0)])
    assert budget.small_bytes == small


@pytest.mark.parametrize(
    ("platform", "dtype", "bytes_each"),
    [("gpu", "bfloat16", 2), ("cpu", "bfloat16", 4), ("gpu", "int8", 1),
     ("cpu", "int8", 1), ("gpu", "float32", 2)],
)  # fmt: skip
def test_frozen_leaves_are_gathered_in_their_own_dtype(platform, dtype, bytes_each):
    """bf16 as fp32 on CPUs; a wider float than the compute dtype in that."""
    own = ClosedForm(
        zero_stage(3), make_precision("bf16"), 1, SIZES, platform, coupled=False
    )
    assert own.gather_bytes(jnp.dtype(dtype)) == bytes_each
