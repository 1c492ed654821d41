"""Is a leaf made whole where it is first used, once, and never kept for the backward?

Values and gradients are held to plain JAX on the same function; where leaves are
gathered is read from traces, which compile nothing.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.sharding.collectives import (
    AutomaticCollectives,
    ManualCollectives,
    manual_spec,
)
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.sharding.zero import shard_leaves, zero_stage
from jaxpar.step.gather_at_use import call_gathering_at_use
from jaxpar.step.gathered_leaf import GatheredAtUse, Gathering

LAYERS, WIDTH, ROWS = 3, 16, 5
SHAPES = {"stack": (LAYERS, WIDTH, WIDTH), "head": (WIDTH, 24), "bias": (320,)}
POLICIES = jax.checkpoint_policies


def layer(h, w):
    return jnp.tanh(checkpoint_name(h @ w, "hidden"))


def through_scan(stack, x, wrap=lambda f: f, **options):
    body = wrap(lambda h, w: (layer(h, w), None))
    return jax.lax.scan(body, x, stack, **options)[0]


@jax.custom_vjp
def doubled_back(w):
    return w * 3


doubled_back.defvjp(lambda w: (w * 3, None), lambda _, ct: (ct * 2,))


@jax.custom_jvp
def steep(w):
    return jnp.sin(w)


steep.defjvp(lambda primals, tangents: (steep(*primals), 5 * tangents[0]))


def scanned(stack, head, bias, x):
    h = through_scan(stack, x)
    return (h @ head).sum() + bias.sum()


def with_remat(policy):
    wrap = functools.partial(jax.checkpoint, policy=policy)

    def fn(stack, head, bias, x):
        h = through_scan(stack, x, wrap)
        return wrap(lambda h, w: (h @ w).sum())(h, head) + bias.sum()

    return fn


def used_thrice(stack, head, bias, x):
    return ((x @ head) ** 2).sum() + (x @ head).sum() + head.sum()


def used_inside_and_outside(stack, head, bias, x):
    return through_scan(stack, x).sum() + stack.sum()


def as_constant(stack, head, bias, x):
    def body(h, _):
        return jnp.tanh(h @ head @ head.T), None

    return jax.lax.scan(body, x, None, length=3)[0].sum()


def as_carry(stack, head, bias, x):
    def body(w, _):
        return w * 1.5, (x @ w).sum()

    w, sums = jax.lax.scan(body, head, None, length=2)
    return w.sum() + sums.sum()


def in_branches(stack, head, bias, x):
    return jax.lax.cond(
        x.sum() > 0, lambda: (x @ head).sum(), lambda: head[0].sum() * 2
    )


def through_jit(stack, head, bias, x):
    run = jax.jit(lambda s, h: jax.jit(through_scan)(s, x) @ h)
    return run(stack, head).sum()


def through_custom_rules(stack, head, bias, x):
    return (x @ doubled_back(head)).sum() + steep(bias).sum()


def nested_scans(stack, head, bias, x):
    """The outer scan slices the stack, the inner one the columns of a layer."""

    def body(h, w):
        total, _ = jax.lax.scan(lambda t, c: (t + c.sum(), None), 0.0, w)
        return layer(h, w) * total, None

    return jax.lax.scan(body, x, stack)[0].sum()


def other_directions(stack, head, bias, x):
    backwards = through_scan(stack, x, reverse=True, unroll=2)
    turned = through_scan(stack.transpose(0, 2, 1), x)
    by_rows = jax.lax.scan(lambda t, w: (t + w.sum(), w.max()), 0.0, head)
    return (backwards * turned).sum() + by_rows[0] + by_rows[1].sum()


def in_loops_and_maps(stack, head, bias, x):
    looped = jax.lax.fori_loop(0, LAYERS, lambda i, h: layer(h, stack[i]), x)
    mapped = jax.vmap(lambda row: row @ head)(looped)
    return mapped.sum() + jax.lax.map(jnp.sum, stack).sum()


FUNCTIONS = {
    "scan": scanned,
    "remat": with_remat(None),
    "remat everything": with_remat(POLICIES.everything_saveable),
    "remat dots": with_remat(POLICIES.dots_with_no_batch_dims_saveable),
    "remat names": with_remat(POLICIES.save_only_these_names("hidden")),
    "used thrice": used_thrice,
    "inside and outside": used_inside_and_outside,
    "constant of a scan": as_constant,
    "carry of a scan": as_carry,
    "branches": in_branches,
    "jit": through_jit,
    "custom rules": through_custom_rules,
    "nested scans": nested_scans,
    "other directions": other_directions,
    "loops and maps": in_loops_and_maps,
}


def make_plans(data=4) -> list[LeafSharding]:
    leaves = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()
    }
    whole = {name: (None,) * len(shape) for name, shape in SHAPES.items()}
    sizes = {"data": data, "pipe": 1, "tensor": 1}
    return list(shard_leaves(leaves, whole, zero_stage(3), sizes).values())


PLANS = make_plans()


def make_leaves() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(0, 0.2, s).astype(np.float32) for s in SHAPES.values()]


MODES = {
    "at use": {},
    "before": {"is_done": True},
    "ahead": {"ahead": True},
    "kept": {"keep": True},
    "kept, ahead": {"keep": True, "ahead": True},
}
X = np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype(np.float32)


def deferred_fn(fn, collectives, *, mode="at use", dtype=jnp.float32, plans=PLANS):
    """``(shards, x) -> fn(...)`` by `call_gathering_at_use`, as the ZeRO stages do."""
    gathering = Gathering(collectives, **MODES[mode])

    def run(shards, x):
        leaves = []
        for plan, slot in zip(plans, shards, strict=True):
            source = jax.lax.stop_gradient(slot)
            if gathering.is_done:
                source = collectives.gather(plan, source.astype(dtype))
            own = jnp.dtype(dtype)
            leaves.append(GatheredAtUse(plan, slot, source, own, gathering))
        return call_gathering_at_use(lambda whole, x: fn(*whole, x), leaves, x)

    return run


@functools.cache
def plain(case):
    fn = FUNCTIONS[case]
    run = jax.jit(jax.value_and_grad(lambda leaves, x: fn(*leaves, x)))
    return jax.device_get(run(make_leaves(), X))


def check_same(found, expected):
    value, grads = found
    assert float(value) == pytest.approx(float(expected[0]), rel=1e-5)
    for grad, right in zip(grads, expected[1], strict=True):
        assert grad.dtype == jnp.float32
        np.testing.assert_allclose(grad, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", FUNCTIONS)
def test_values_and_gradients_equal_plain_jax(case, mode):
    run = deferred_fn(FUNCTIONS[case], AutomaticCollectives(), mode=mode)
    check_same(jax.jit(jax.value_and_grad(run))(make_leaves(), X), plain(case))


def manual(body, mesh, out_specs):
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=([manual_spec(plan) for plan in PLANS], P()),
        out_specs=out_specs,
        axis_names={"data"},
        check_vma=False,
    )


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshShape(data=4), jax.devices()[:4])


@pytest.mark.parametrize("mode", MODES)
def test_gradients_over_a_real_data_axis_are_sums_over_it(mesh, mode):
    """Shard d's rows are x (d + 1): the sum over data is of four plain gradients."""
    collectives = ManualCollectives(("data",), jnp.dtype(jnp.float32), "cpu")
    run = deferred_fn(scanned, collectives, mode=mode)

    def body(shards, x):
        x = x * (jax.lax.axis_index("data") + 1)
        value, grads = jax.value_and_grad(run)(shards, x)
        return collectives.total(value), grads

    specs = (P(), [manual_spec(plan) for plan in PLANS])
    found = jax.jit(manual(body, mesh, specs))(make_leaves(), X)
    rows = np.concatenate([X * (shard + 1) for shard in range(4)])
    value, grads = jax.jit(jax.value_and_grad(lambda leaves, x: scanned(*leaves, x=x)))(
        make_leaves(), rows
    )
    bias = float(make_leaves()[2].sum())
    grads[2] *= 4
    check_same(found, (float(value) + 3 * bias, grads))


def find_collectives(jaxpr, wanted, path=()):
    """(enclosing primitives, shape of the result) of each collective in a jaxpr."""
    found = []
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == wanted:
            found.append((path, tuple(eqn.outvars[0].aval.shape)))
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found += find_collectives(inner, wanted, (*path, name))
    return found


def traced(fn, mesh, *, mode="at use", grad=False, dtype=jnp.float32):
    collectives = ManualCollectives(("data",), jnp.dtype(dtype), "cpu")
    run = deferred_fn(fn, collectives, mode=mode, dtype=dtype)
    body, specs = run, P()
    if grad:
        body, specs = jax.grad(run), [manual_spec(plan) for plan in PLANS]
    return jax.make_jaxpr(manual(body, mesh, specs))(make_leaves(), X).jaxpr


@pytest.mark.parametrize("case", ["scan", "remat", "remat dots", "jit", "nested scans"])
def test_stack_is_gathered_layer_by_layer_inside_the_scan(case, mesh):
    gathers = find_collectives(traced(FUNCTIONS[case], mesh), "all_gather")
    of_stack = [g for g in gathers if g[1] in (SHAPES["stack"], SHAPES["stack"][1:])]
    assert [shape for _, shape in of_stack] == [SHAPES["stack"][1:]]
    assert "scan" in of_stack[0][0]


def test_leaf_used_thrice_is_gathered_once(mesh):
    gathers = find_collectives(traced(used_thrice, mesh), "all_gather")
    assert [shape for _, shape in gathers] == [SHAPES["head"]]


def test_leaf_that_is_not_used_is_not_gathered(mesh):
    assert not find_collectives(traced(lambda s, h, b, x: x.sum(), mesh), "all_gather")


def test_constant_of_a_scan_is_gathered_once_outside_it(mesh):
    ((path, shape),) = find_collectives(traced(as_constant, mesh), "all_gather")
    assert "scan" not in path
    assert shape == SHAPES["head"]


def test_leaf_of_both_scopes_is_gathered_in_each(mesh):
    gathers = find_collectives(traced(used_inside_and_outside, mesh), "all_gather")
    assert sorted(("scan" in path, shape) for path, shape in gathers) == [
        (False, SHAPES["stack"]),
        (True, SHAPES["stack"][1:]),
    ]


def test_stack_split_along_its_layers_is_gathered_before_the_scan(mesh, monkeypatch):
    """It cannot be sliced as a shard: slices of one layer lie on one device."""
    rows = dataclasses.replace(PLANS[1], data_dim=0)
    assert rows.without_leading_dim() is None
    plans = [PLANS[0], rows, PLANS[2]]
    monkeypatch.setattr(f"{__name__}.PLANS", plans)
    collectives = ManualCollectives(("data",), jnp.dtype(jnp.float32), "cpu")

    def by_rows(stack, head, bias, x):
        return jax.lax.scan(lambda t, w: (t + w.sum(), None), 0.0, head)[0]

    run = deferred_fn(by_rows, collectives, plans=plans)
    jaxpr = jax.make_jaxpr(manual(run, mesh, P()))(make_leaves(), X).jaxpr
    ((path, shape),) = find_collectives(jaxpr, "all_gather")
    assert "scan" not in path
    assert shape == SHAPES["head"]


@pytest.mark.parametrize("case", ["scan", "remat", "remat everything", "jit"])
def test_backward_pass_gathers_again_and_reduces_each_layer_once(case, mesh):
    jaxpr = traced(FUNCTIONS[case], mesh, grad=True)
    one_layer = SHAPES["stack"][1:]
    gathers = [g for g in find_collectives(jaxpr, "all_gather") if g[1] == one_layer]
    scatters = find_collectives(jaxpr, "reduce_scatter")
    piece = math.prod(one_layer) // 4
    of_layers = [path for path, shape in scatters if math.prod(shape) == piece]
    assert len(gathers) == 2
    assert len(of_layers) == 1
    assert all("scan" in path for path in [*of_layers, *(p for p, _ in gathers)])


def test_leaf_already_whole_is_not_gathered_and_its_gradient_scattered_in_the_scan(
    mesh,
):
    jaxpr = traced(scanned, mesh, mode="before", grad=True)
    gathers = find_collectives(jaxpr, "all_gather")
    assert sorted(shape for _, shape in gathers) == sorted(SHAPES.values())
    assert not any("scan" in path for path, _ in gathers)
    in_scan = [s for p, s in find_collectives(jaxpr, "reduce_scatter") if "scan" in p]
    assert [math.prod(shape) for shape in in_scan] == [WIDTH * WIDTH // 4]


def residuals(fn, mesh, dtype=jnp.bfloat16) -> list[tuple]:
    """Shapes and dtypes of what the forward pass keeps for the backward pass."""
    kept = []
    collectives = ManualCollectives(("data",), jnp.dtype(dtype), "cpu")
    run = deferred_fn(fn, collectives, dtype=dtype)

    def body(shards, x):
        out, pull = jax.vjp(lambda s: run(s, x.astype(dtype)), shards)
        kept.extend((tuple(r.shape), r.dtype) for r in jax.tree.leaves(pull))
        return out

    jax.eval_shape(manual(body, mesh, P()), make_leaves(), X)
    return kept


WHOLE = {SHAPES["stack"], SHAPES["stack"][1:], SHAPES["head"], SHAPES["head"][::-1]}
"""Sizes that only a gathered leaf has, as a stack over layers or alone."""


# What a loop carries is the user's own value, changed or not.
@pytest.mark.parametrize("case", sorted(FUNCTIONS.keys() - {"carry of a scan"}))
def test_no_gathered_leaf_is_kept_for_the_backward_pass(case, mesh):
    """bf16 arrays of a leaf's shape would be the gathered copies."""
    kept = residuals(FUNCTIONS[case], mesh)
    assert kept, "shards at least are kept"
    assert not [k for k in kept if k[1] == jnp.bfloat16 and k[0] in WHOLE]


def test_outputs_may_be_leaves_constants_and_integers():
    def fn(leaves, x):
        return {"leaf": leaves[2], "constant": 3, "count": x.shape[0], "x": x}

    gathering, dtype = Gathering(AutomaticCollectives()), jnp.dtype("bfloat16")
    leaves = [
        GatheredAtUse(p, jnp.asarray(a), jnp.asarray(a), dtype, gathering)
        for p, a in zip(PLANS, make_leaves(), strict=True)
    ]
    out = call_gathering_at_use(fn, leaves, X)
    assert out["leaf"].dtype == jnp.bfloat16
    assert np.array_equal(out["leaf"], make_leaves()[2].astype(jnp.bfloat16))
    assert (int(out["constant"]), int(out["count"])) == (3, ROWS)
    assert np.array_equal(out["x"], X)
