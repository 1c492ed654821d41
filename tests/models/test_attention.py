"""Does attention as a module project, mask and attend as it says?"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder
from jaxpar.models.attention import Attention, Heads
from jaxpar.models.blocked_attention import Scoring


def test_projections_have_the_biases_and_widths_that_are_asked_for():
    layer = Attention(
        8,
        Heads(2, 1, 6),
        biases=("query", "value", "output"),
        output_stddev=0.02,
        implementation="xla",
        rngs=nnx.Rngs(0),
    )
    assert layer.query.kernel.shape == (8, 12)
    assert layer.output.kernel.shape == (12, 8)
    biases = {
        name: getattr(layer, name).bias is not None
        for name in ("query", "key", "value", "output")
    }
    assert biases == {"query": True, "key": False, "value": True, "output": True}


def test_each_projection_may_have_its_standard_deviation():
    own = {"query": 0.3, "output": 0.5}
    layer: Any = Attention(
        64, Heads(4, 4, 16), biases=(), output_stddev=own, rngs=nnx.Rngs(0)
    )
    found = {
        name: float(getattr(layer, name).kernel[...].std())
        for name in ("query", "key", "value", "output")
    }
    right = {"key": 0.02, "value": 0.02, **own}
    assert found == pytest.approx(right, rel=0.05)


def test_result_may_be_wider_than_the_input():
    layer = Attention(
        (8, 12), Heads(2, 2, 6), biases=(), output_stddev=0.02, rngs=nnx.Rngs(0)
    )
    assert layer.value.kernel.shape == (8, 12)
    assert layer(jnp.ones((2, 3, 8))).shape == (2, 3, 12)


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize(("kv_heads", "bias"), [(4, True), (2, True), (2, False)])
def test_one_matmul_projects_as_three_would(kv_heads: int, bias: bool, tensor: int):
    """Also where a device has no whole group of heads: then it is three."""
    module: Any = Attention(
        32,
        Heads(4, kv_heads, 8),
        biases=("query", "value", "output") if bias else (),
        output_stddev=0.02,
        rngs=nnx.Rngs(0),
    )
    parts = module.query, module.key, module.value
    if bias:
        for part, seed in ((module.query, 1), (module.value, 2)):
            own = np.random.default_rng(seed).normal(size=part.bias.shape)
            part.bias[...] = jnp.asarray(own, jnp.float32)
    graphdef, state = nnx.split(module)
    x = jnp.asarray(np.random.default_rng(3).normal(size=(2, 6, 32)), jnp.float32)

    def total(state: nnx.State, x: jax.Array, fused: bool) -> jax.Array:
        own: Any = nnx.merge(graphdef, state)
        parts = own.query, own.key, own.value
        found = own._project(x) if fused else [part(x) for part in parts]
        return sum(jnp.sin(each * (i + 1)).sum() for i, each in enumerate(found))

    wanted = [part(x) for part in parts]
    expected = jax.grad(total, (0, 1))(state, x, False)
    mesh = make_mesh(MeshShape(tensor=tensor), jax.devices()[:tensor])
    with jax.set_mesh(mesh):
        found = jax.jit(lambda s, x: nnx.merge(graphdef, s)._project(x))(state, x)
        grads = jax.jit(jax.grad(total, (0, 1)), static_argnums=2)(state, x, True)
        program = str(jax.make_jaxpr(lambda x: module._project(x))(x))
    for own, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)
    for own, other in zip(*map(jax.tree.leaves, (grads, expected)), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)
    # Equal inner programs are printed once.
    assert (program.count("dot_general") == 1) == (kv_heads % tensor == 0)


def test_a_memory_is_attended_to_whole_and_by_its_segments():
    layer = Attention(
        8,
        Heads(2, 2, 4),
        biases=(),
        output_stddev=0.3,
        scoring=Scoring(causal=False),
        rngs=nnx.Rngs(0),
    )
    rng = np.random.default_rng(0)
    x, memory = (
        jnp.asarray(rng.normal(size=(2, length, 8)), jnp.float32) for length in (3, 5)
    )
    ids = jnp.array([[1, 1, 2], [1, 1, 1]])
    of_memory = jnp.array([[1, 1, 2, 2, 0], [1, 1, 1, 1, 1]])
    out = layer(
        x, memory_BSD=memory, segment_ids_BT=ids, memory_segment_ids_BS=of_memory
    )
    for row, token in np.ndindex(2, 3):
        seen = np.asarray(of_memory[row] == ids[row, token])
        own = layer(
            x[row : row + 1, token : token + 1],
            memory_BSD=memory[:1, :0]
            if not seen.any()
            else memory[row : row + 1, seen],
        )
        np.testing.assert_allclose(out[row, token], own[0, 0], atol=1e-6)


def test_tensor_axis_that_cuts_heads_is_refused_before_the_step_is_compiled():
    config = DecoderConfig(num_layers=1, num_heads=4, width=32, seq_len=8)
    engine = jaxpar.initialize(
        model=make_decoder(config),
        loss_fn=decoder_loss,
        optimizer=optax.sgd(0.1),
        sample_batch={"tokens": np.zeros((8, 9), np.int32)},
        mesh=jaxpar.MeshShape(tensor=8),
    )
    said = r"num_heads=4: the mesh's tensor=8 must divide it"
    with pytest.raises(ValueError, match=said):
        engine.step({"tokens": np.zeros((8, 9), np.int32)})
