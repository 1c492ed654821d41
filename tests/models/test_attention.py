from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.models import attention
from jaxpar.models.attention import (
    Attention,
    Heads,
    attend,
    attention_implementation,
)
from jaxpar.models.causal_attention import Scoring

# compute capability (0: no NVIDIA GPU), dtype, head size, masked, answer to "auto"
DECISIONS = [
    (9.0, "bfloat16", 128, False, "cudnn"),
    (9.0, "float16", 256, False, "cudnn"),
    (8.0, "bfloat16", 128, False, "cudnn"),
    (8.0, "bfloat16", 256, False, "xla"),
    (7.5, "float16", 64, False, "xla"),
    (9.0, "float32", 64, False, "xla"),
    (9.0, "bfloat16", 60, False, "xla"),
    (9.0, "bfloat16", 64, True, "xla"),
    (0.0, "bfloat16", 64, False, "blocked"),
    (0.0, "float32", 64, True, "blocked"),
]


def decide(choice: str, dtype: str, head_size: int, masked: bool) -> str:
    return attention_implementation(
        choice, dtype=jnp.dtype(dtype), head_size=head_size, masked=masked
    )


@pytest.mark.parametrize(
    ("capability", "dtype", "head_size", "masked", "answer"), DECISIONS
)
def test_auto_means_cudnn_where_its_kernel_takes_the_inputs_and_blocks_on_cpu(
    monkeypatch: pytest.MonkeyPatch,
    capability: float,
    dtype: str,
    head_size: int,
    masked: bool,
    answer: str,
):
    kind = f"NVIDIA GPU {capability}" if capability else "cpu"
    device = SimpleNamespace(device_kind=kind, compute_capability=str(capability))
    monkeypatch.setattr(attention.jax, "devices", lambda: [device])
    assert decide("auto", dtype, head_size, masked) == answer


def test_auto_under_a_cpu_mesh_means_blocks_beside_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    device = SimpleNamespace(device_kind="NVIDIA GPU", compute_capability="9.0")
    monkeypatch.setattr(attention.jax, "devices", lambda: [device])
    assert decide("auto", "bfloat16", 64, False) == "cudnn"
    with jax.set_mesh(mesh):
        assert decide("auto", "bfloat16", 64, False) == "blocked"


@pytest.mark.parametrize("choice", ["xla", "cudnn"])
def test_a_named_implementation_is_taken_at_its_word(choice: str):
    assert decide(choice, "float32", 60, True) == choice


def test_a_cap_of_scores_means_blocks_of_queries():
    for choice in ("auto", "cudnn", "xla"):
        found = attention_implementation(
            choice,
            dtype=jnp.dtype("bfloat16"),
            head_size=64,
            masked=False,
            scoring=Scoring(softcap=50.0),
        )
        assert found == "blocked"


def test_xla_has_windows_and_scales():
    rng = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(rng.normal(size=(2, 9, 4, 8)), jnp.float32) for _ in range(3)
    )
    scoring = Scoring(window=3, scale=0.4)
    one, other = (
        attend(query, key, value, None, implementation=choice, scoring=scoring)
        for choice in ("xla", "blocked")
    )
    np.testing.assert_allclose(one, other, atol=1e-5)


def test_attend_equals_numpy_with_grouped_heads():
    rng = np.random.default_rng(0)
    B, T, N, K, H = 2, 5, 4, 2, 3
    query = rng.normal(size=(B, T, N, H)).astype(np.float32)
    key, value = rng.normal(size=(2, B, T, K, H)).astype(np.float32)
    mask = rng.random((B, 1, T, T)) < 0.7
    mask |= np.eye(T, dtype=bool)
    want = np.empty_like(query)
    for b, t, n in np.ndindex(B, T, N):
        seen = [s for s in range(t + 1) if mask[b, 0, t, s]]
        scores = key[b, seen, n // (N // K)] @ query[b, t, n] / np.sqrt(H)
        probability = np.exp(scores - scores.max())
        probability /= probability.sum()
        want[b, t, n] = probability @ value[b, seen, n // (N // K)]
    got = attend(*map(jnp.asarray, (query, key, value, mask)), implementation="xla")
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_attend_saves_no_scores_for_the_backward_pass():
    query = jnp.ones((1, 16, 2, 4))
    _, vjp = jax.vjp(
        lambda q, k, v: attend(q, k, v, None, implementation="xla"),
        query,
        query + 1,
        query + 2,
    )
    assert max(leaf.size for leaf in jax.tree.leaves(vjp)) == query.size


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
