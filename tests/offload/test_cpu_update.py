"""What does an update by the host send, keep in place, and say of itself?

tests/equivalence/test_offload.py has what it trains like.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.engine.host_programs import HostBetween
from jaxpar.offload import cpu_update, streamed_optimizer
from tests.equivalence.perceptron import batches, make_engine

OFFLOAD = jaxpar.Offload(piece_mb=0.0002, update="host")
"""Vectors are large enough to be offloaded."""


OR_NOT = (OFFLOAD, None)


def engine_of(optimizer=None, **options) -> jaxpar.Engine:
    given = {"offload": OFFLOAD, **options}
    return make_engine(optimizer or optax.adamw(1e-2), 4, 2, 1, **given)


def pointers(engine: jaxpar.Engine) -> list[int]:
    """Where the shards of the large leaves of the state are."""
    leaves = jax.tree.leaves((engine.state.params, engine.state.opt_state))
    return [
        shard.data.unsafe_buffer_pointer()
        for leaf in leaves
        if leaf.ndim
        for shard in leaf.addressable_shards
    ]


def test_gradients_are_sent_to_the_host_by_the_first_program() -> None:
    engine = engine_of(precision="bf16")
    program = engine.loss().program.step
    assert isinstance(program, HostBetween)
    kinds = [place.memory_kind for place in jax.tree.leaves(program.places.grads)]
    assert kinds == ["pinned_host"] * 4
    assert engine.placement.host_grads == (0, 1, 2, 3)


def test_gradients_leave_early_where_the_backward_pass_reduces_them() -> None:
    """And their norm is that of a step without offload."""
    early, plain = (make_engine(optax.adamw(1e-2), 4, 2, 3, offload=o) for o in OR_NOT)
    assert early.placement.early_grads == (0, 1, 2, 3)
    assert "<host>" in str(early.traces()["gradients"].jaxpr)
    for batch in batches():
        found, right = (float(e.step(batch)["grad_norm"]) for e in (early, plain))
        assert found == pytest.approx(right, rel=1e-5)


class Twice(nnx.Module):
    """One stack of layers, in two loops and in a loop of loops."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.Param(0.2 * rngs.params.normal((4, 16, 16)))
        self.out = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ kernel), None

        def all_layers(x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
            return jax.lax.scan(layer, x, self.layers[...])

        x, _ = jax.lax.scan(all_layers, all_layers(x)[0], None, length=2)
        return self.out(x)


def squared(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"data": 4}, {"zero": 3, "prefetch": True}),
        pytest.param({"data": 4}, {"zero": 2}, marks=pytest.mark.thorough),
        pytest.param(
            {"replica": 2, "data": 2}, {"zero": 3}, marks=pytest.mark.thorough
        ),
    ],
    ids=str,
)
def test_gradients_of_a_stack_in_several_loops_are_added(mesh, options) -> None:
    losses = []
    for offload in OR_NOT:
        engine = jaxpar.initialize(
            model=lambda rngs: Twice(rngs),
            loss_fn=lambda model, batch: jnp.mean(
                (model(batch["x"]) - batch["y"]) ** 2
            ),
            optimizer=optax.adamw(1e-2),
            sample_batch=batches()[0],
            mesh=jaxpar.make_mesh(jaxpar.MeshShape(**mesh), jax.devices()[:4]),
            offload=offload,
            **options,
        )
        losses.append([float(engine.step(batch)["loss"]) for batch in batches()])
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_in_place_the_state_keeps_its_memory() -> None:
    made = functools.partial(cpu_update.CpuUpdate, in_place=True)
    with mock.patch.object(streamed_optimizer, "CpuUpdate", made):
        engine = engine_of()
    engine.step(batches()[0])
    before = pointers(engine)
    engine.step(batches()[1])
    assert pointers(engine) == before


def test_notes_say_what_is_moved_and_by_what() -> None:
    engine = engine_of()
    (line,) = [x for x in engine.explain().notes if "host computes" in x]
    leaves = jax.tree.leaves(engine.state.params)
    elements = sum(leaf.addressable_shards[0].data.size for leaf in leaves)
    # Masters, two moments and gradients are read, all but these written, in fp32.
    moved = elements * 4 * 7
    assert "the update of 4 parameters" in line
    assert f"{moved / 1000:.1f} kB a step" in line
    assert "by compiled C code." in line
    with mock.patch.object(cpu_update, "compiled", side_effect=OSError("no cc")):
        (line,) = [x for x in engine_of().explain().notes if "host computes" in x]
    assert "by XLA's CPU backend, for in C: no cc." in line


def test_a_leaf_that_has_no_c_goes_by_xla() -> None:
    def strange() -> optax.GradientTransformation:
        def update(grads, state, params=None):
            del params
            small = jax.tree.map(lambda g: jax.scipy.special.erfinv(g / 100), grads)
            return jax.tree.map(jnp.negative, small), state

        return optax.GradientTransformation(lambda params: optax.EmptyState(), update)

    engine, plain = (engine_of(strange(), offload=each) for each in OR_NOT)
    for batch in batches():
        found, right = (float(each.step(batch)["loss"]) for each in (engine, plain))
        assert found == pytest.approx(right, rel=1e-6)
    assert any("erf_inv of float32" in line for line in engine.explain().notes)


def test_a_scalar_of_all_gradients_reads_them_where_they_are() -> None:
    chained = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(1.0))
    engine, plain = (engine_of(chained, offload=each) for each in OR_NOT)
    found, right = (
        [float(each.step(batch)["loss"]) for batch in batches()]
        for each in (engine, plain)
    )
    np.testing.assert_allclose(found, right, rtol=1e-6)
    assert any("host computes" in line for line in engine.explain().notes)
