"""Do leaves cross the data axis with their values, on a real 4 x 2 mesh?

Values are small integers, exact in every dtype, so that sums are compared exactly.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.sharding import collectives as module
from jaxpar.sharding.collectives import (
    AutomaticCollectives,
    Collectives,
    ManualCollectives,
    from_view,
    manual_spec,
    to_view,
)
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.sharding.zero import shard_leaves, zero_stage

DATA, TENSOR = 4, 2
SHAPES = {
    "both": ((16, 32), None),
    "ruled": ((16, 32), 1),
    "shared": ((512,), None),
    "shared, ruled": ((512,), 0),
    "shared, inner dim": ((3, 128, 5), None),
    "shared, inner, ruled": ((3, 128, 5), 1),
    "stack": ((2, 32, 16), 2),
    "data only": ((4, 75), None),
    "tensor only": ((6, 51), None),
    "whole": ((17, 17), None),
    "small": ((4, 8), None),
    "small, ruled": ((4, 8), 1),
    "scalar": ((), None),
}
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def make_plans() -> dict[str, LeafSharding]:
    leaves = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, (shape, _) in SHAPES.items()
    }
    compute = {
        name: tuple("tensor" if dim == ruled else None for dim in range(len(shape)))
        for name, (shape, ruled) in SHAPES.items()
    }
    sizes = {"data": DATA, "pipe": 1, "tensor": TENSOR}
    return shard_leaves(leaves, compute, zero_stage(3), sizes)


PLANS = make_plans()
LEAVES = {
    name: (np.arange(math.prod(plan.shape)) % 7).reshape(plan.shape).astype(np.float32)
    for name, plan in PLANS.items()
}
IN_DTYPE = list(itertools.product(PLANS, [jnp.dtype(d).name for d in DTYPES]))


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshShape(data=DATA, tensor=TENSOR))


@pytest.fixture(scope="module")
def placed(mesh):
    """The leaves, at rest."""
    return {
        name: jax.device_put(leaf, NamedSharding(mesh, PLANS[name].stored_spec))
        for name, leaf in LEAVES.items()
    }


def over_plans(fn, *trees):
    return {name: fn(plan, *(t[name] for t in trees)) for name, plan in PLANS.items()}


@pytest.fixture(scope="module")
def crossed(mesh, placed):
    """Every leaf through every collective and dtype, in one program.

    Shard d's gradient is (d + 1) times the leaf, so the sum is 10 times the leaf.
    """

    def body(views):
        index = jax.lax.axis_index("data")
        manual = {d: ManualCollectives(("data",), jnp.dtype(d), "cpu") for d in DTYPES}
        gathered = {
            jnp.dtype(d).name: over_plans(
                lambda p, v, d=d, x=x: x.gather(p, v.astype(d)), views
            )
            for d, x in manual.items()
        }
        reduced = {
            name: over_plans(
                lambda p, w, x=x: x.reduce(p, w * (index + 1).astype(w.dtype)),
                gathered[name],
            )
            for (name, x) in ((jnp.dtype(d).name, x) for d, x in manual.items())
        }  # fmt: skip
        one = manual[jnp.float32]
        return gathered, reduced, one.total(index), one.shard_number()[None]

    specs = over_plans(manual_spec)
    names = [jnp.dtype(d).name for d in DTYPES]

    @jax.jit
    def run(leaves):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            views = over_plans(to_view, leaves)
            out = jax.shard_map(
                body,
                mesh=mesh,
                in_specs=(specs,),
                out_specs=(P(), dict.fromkeys(names, specs), P(), P("data")),
                axis_names={"data"},
                check_vma=False,
            )(views)
            return views, over_plans(from_view, views), *out

    return run(placed)


@pytest.mark.parametrize("name", PLANS)
def test_view_is_the_leaf_reshaped_and_nothing_moves(name, crossed, placed):
    plan, view, back = PLANS[name], crossed[0][name], crossed[1][name]
    assert np.array_equal(view, LEAVES[name].reshape(plan.view_shape))
    assert np.array_equal(back, LEAVES[name])
    assert back.sharding.is_equivalent_to(placed[name].sharding, back.ndim)
    for moved in (view, back):
        for shard in moved.addressable_shards:
            (stored,) = (
                other
                for other in placed[name].addressable_shards
                if other.device == shard.device
            )
            assert np.array_equal(np.ravel(shard.data), np.ravel(stored.data))


@pytest.mark.parametrize(("name", "dtype"), IN_DTYPE)
def test_gather_makes_the_whole_leaf_at_its_compute_spec(name, dtype, crossed, mesh):
    whole = crossed[2][dtype][name]
    assert whole.dtype == jnp.dtype(dtype)
    assert np.array_equal(np.asarray(whole, np.float32), LEAVES[name])
    computed = NamedSharding(mesh, PLANS[name].compute_spec)
    assert whole.sharding.is_equivalent_to(computed, whole.ndim)


@pytest.mark.parametrize(("name", "dtype"), IN_DTYPE)
def test_reduce_sums_over_data_into_the_fp32_view_at_rest(name, dtype, crossed, mesh):
    plan, summed = PLANS[name], crossed[3][dtype][name]
    assert summed.dtype == jnp.float32
    assert np.array_equal(summed, 10 * LEAVES[name].reshape(plan.view_shape))
    pieces = {str(shard.index) for shard in summed.addressable_shards}
    if plan.data_dim is not None:
        assert len(pieces) % DATA == 0


def test_total_sums_over_data(crossed):
    assert int(crossed[4]) == 0 + 1 + 2 + 3


def test_every_data_shard_knows_its_number(crossed):
    assert np.asarray(crossed[5]).tolist() == list(range(DATA))


def collectives(reduce_dtype, platform, mesh) -> list[tuple[str, str]]:
    """The dtype in which each gradient is reduced, from the trace alone."""

    def body(grads):
        manual = ManualCollectives(("data",), jnp.dtype(reduce_dtype), platform)
        return over_plans(manual.reduce, grads)

    grads = {name: jnp.zeros(plan.shape) for name, plan in PLANS.items()}
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jaxpr = jax.make_jaxpr(
            jax.shard_map(
                body,
                mesh=mesh,
                in_specs=P(),
                out_specs=over_plans(manual_spec),
                axis_names={"data"},
                check_vma=False,
            )
        )(grads)
    return [
        (eqn.primitive.name, eqn.invars[0].aval.dtype.name)
        for eqn in equations(jaxpr.jaxpr)
        if eqn.primitive.name in ("psum", "reduce_scatter", "psum_scatter")
    ]


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name == "shard_map":
            yield from equations(eqn.params["jaxpr"])


@pytest.mark.parametrize(
    ("platform", "crosses_in"), [("gpu", "bfloat16"), ("cpu", "float32")]
)
def test_gradients_cross_in_the_reduce_dtype_but_on_cpu(platform, crosses_in, mesh):
    found = collectives(jnp.bfloat16, platform, mesh)
    assert [dtype for _, dtype in found] == [crosses_in] * len(PLANS)
    scattered = sum(plan.data_dim is not None for plan in PLANS.values())
    assert [name for name, _ in found].count("reduce_scatter") == scattered
    assert 0 < scattered < len(PLANS)


def test_automatic_exchange_keeps_values_and_states_layouts(mesh, placed):
    automatic = AutomaticCollectives()

    @jax.jit
    def run(leaves):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            whole = over_plans(automatic.gather, over_plans(to_view, leaves))
            return whole, over_plans(automatic.reduce, whole)

    whole, reduced = run(placed)
    for name, plan in PLANS.items():
        assert np.array_equal(whole[name], LEAVES[name])
        assert np.array_equal(reduced[name], LEAVES[name].reshape(plan.view_shape))
        computed = NamedSharding(mesh, plan.compute_spec)
        assert whole[name].sharding.is_equivalent_to(computed, len(plan.shape))
        rests = NamedSharding(mesh, plan.view_spec())
        assert reduced[name].sharding.is_equivalent_to(rests, len(plan.view_shape))


def test_automatic_scalars_are_global_already():
    automatic, value = AutomaticCollectives(), jnp.float32(3.0)
    assert automatic.total(value) is value
    assert automatic.shard_number() == 0


@pytest.mark.parametrize(
    "made",
    [AutomaticCollectives(), ManualCollectives(("data",), jnp.dtype("float32"), "cpu")],
)
def test_both_forms_have_the_one_interface(made):
    assert isinstance(made, Collectives)
    assert module.Collectives is Collectives
