"""Which program computes attention, and does each compute the same?"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.models import attend as programs
from jaxpar.models.attend import attend, attention_implementation
from jaxpar.models.blocked_attention import Scoring

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
    monkeypatch.setattr(programs.jax, "devices", lambda: [device])
    assert decide("auto", dtype, head_size, masked) == answer


def test_auto_under_a_cpu_mesh_means_blocks_beside_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    device = SimpleNamespace(device_kind="NVIDIA GPU", compute_capability="9.0")
    monkeypatch.setattr(programs.jax, "devices", lambda: [device])
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


def test_a_bias_of_scores_means_xla_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    device = SimpleNamespace(device_kind="NVIDIA GPU", compute_capability="9.0")
    monkeypatch.setattr(programs.jax, "devices", lambda: [device])
    given = {"dtype": jnp.dtype("bfloat16"), "head_size": 64, "masked": False}
    assert attention_implementation("auto", **given) == "cudnn"
    assert attention_implementation("auto", biased=True, **given) == "xla"


def test_xla_has_biases_and_other_keys_than_queries():
    rng = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(rng.normal(size=(2, length, 4, 8)), jnp.float32)
        for length in (9, 5, 5)
    )
    bias = jnp.asarray(rng.normal(size=(4, 9, 5)), jnp.float32)
    scoring = Scoring(causal=False)
    one, other = (
        attend(
            *(query, key, value, None),
            implementation=choice,
            scoring=scoring,
            bias_NTS=bias,
        )
        for choice in ("xla", "blocked")
    )
    np.testing.assert_allclose(one, other, atol=1e-5)
    apart = attend(query, key, value, None, implementation="xla", scoring=scoring)
    assert float(jnp.abs(apart - one).max()) > 1e-2


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
