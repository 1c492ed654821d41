"""Is the loss of chunks that of whole logits, with its gradients, in every dtype?"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.losses import cross_entropy
from jaxpar.mesh import MeshShape, make_mesh

RNG = np.random.default_rng(0)
ROWS, LENGTH, WIDTH, VOCAB = 3, 8, 16, 40
HIDDEN = RNG.normal(size=(ROWS, LENGTH, WIDTH))
KERNEL = RNG.normal(size=(WIDTH, VOCAB))
BIAS = np.random.default_rng(1).normal(size=VOCAB)
TARGETS = RNG.integers(0, VOCAB, size=(ROWS, LENGTH))
WEIGHTS = RNG.random((ROWS, LENGTH)) * 2
WEIGHTS[0, 3] = 0
RULES: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"soft_cap": 5.0},
    {"label_smoothing": 0.2, "z_loss": 1e-3, "soft_cap": 8.0},
]


def reference(
    hidden: np.ndarray,
    kernel: np.ndarray,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
) -> tuple[float, list[np.ndarray]]:
    """Loss and gradients by hidden, kernel and weights: NumPy, fp64, whole logits."""
    hidden, kernel = hidden.astype(np.float64), kernel.astype(np.float64)
    raw = hidden @ kernel
    logits = raw if soft_cap is None else soft_cap * np.tanh(raw / soft_cap)
    norm = np.log(np.exp(logits).sum(-1))
    wanted = np.full(logits.shape, label_smoothing / VOCAB)
    np.put_along_axis(
        wanted, TARGETS[..., None], 1 - label_smoothing + label_smoothing / VOCAB, -1
    )
    losses = norm - (wanted * logits).sum(-1) + z_loss * norm**2
    share = np.exp(logits - norm[..., None])
    grad = share * (1 + 2 * z_loss * norm[..., None]) - wanted
    if soft_cap is not None:
        grad *= 1 - np.tanh(raw / soft_cap) ** 2
    grad *= WEIGHTS[..., None]
    grads = [grad @ kernel.T, np.einsum("btd,btv->dv", hidden, grad), losses]
    return float((losses * WEIGHTS).sum()), grads


def loss_and_grads(dtype: Any, **rule: Any) -> tuple[jax.Array, list[jax.Array]]:
    def total(hidden: jax.Array, kernel: jax.Array, weights: jax.Array) -> jax.Array:
        targets = jnp.asarray(TARGETS)
        return cross_entropy(hidden, kernel, targets, weights, **rule).total

    arrays = jnp.asarray(HIDDEN, dtype), jnp.asarray(KERNEL, dtype)
    given = *arrays, jnp.asarray(WEIGHTS, jnp.float32)
    loss, grads = jax.jit(jax.value_and_grad(total, (0, 1, 2)))(*given)
    assert [g.dtype for g in grads] == [dtype, dtype, jnp.float32]
    return loss, list(grads)


def distance(found: Any, wanted: np.ndarray) -> float:
    error = np.linalg.norm(np.asarray(found, np.float64) - wanted)
    return float(error / np.linalg.norm(wanted))


@pytest.mark.parametrize(
    ("rule", "num_chunks"), [*itertools.product(RULES, (1, 4)), ({}, 8), ({}, None)]
)
def test_loss_and_gradients_equal_numpy(rule: dict, num_chunks: int | None):
    loss, grads = loss_and_grads(jnp.float32, num_chunks=num_chunks, **rule)
    wanted, wanted_grads = reference(HIDDEN, KERNEL, **rule)
    assert float(loss) == pytest.approx(wanted, rel=1e-6)
    for found, expected in zip(grads, wanted_grads, strict=True):
        assert distance(found, expected) < 1e-5


@pytest.mark.parametrize("num_chunks", [1, 4])
@pytest.mark.parametrize("rule", [{}, {"soft_cap": 5.0, "label_smoothing": 0.1}])
def test_bias_is_another_feature_that_is_one(rule: dict, num_chunks: int):
    hidden = np.concatenate([HIDDEN, np.ones((ROWS, LENGTH, 1))], -1)
    kernel = np.concatenate([KERNEL, BIAS[None]])
    wanted, (_, expected, _) = reference(hidden, kernel, **rule)

    def total(kernel: jax.Array, bias: jax.Array) -> jax.Array:
        given = jnp.asarray(HIDDEN, jnp.float32), kernel, jnp.asarray(TARGETS)
        weights = jnp.asarray(WEIGHTS, jnp.float32)
        how = {"bias_V": bias, "num_chunks": num_chunks, **rule}
        return cross_entropy(*given, weights, **how).total

    given = jnp.asarray(KERNEL, jnp.float32), jnp.asarray(BIAS, jnp.float32)
    loss, grads = jax.value_and_grad(total, (0, 1))(*given)
    assert float(loss) == pytest.approx(wanted, rel=1e-6)
    assert float(total(*given)) == pytest.approx(wanted, rel=1e-6), "without gradients"
    assert distance(grads[0], expected[:-1]) < 1e-5
    assert distance(grads[1], expected[-1]) < 1e-5


@pytest.mark.parametrize("rule", RULES)
def test_columns_that_are_no_class_have_no_share(rule: dict):
    """As if the head did not have them, though their logits are large."""
    targets = jnp.asarray(TARGETS) % (VOCAB - 7)

    def total(hidden: jax.Array, kernel: jax.Array, num: int | None) -> jax.Array:
        given = hidden, kernel, targets, jnp.asarray(WEIGHTS, jnp.float32)
        return cross_entropy(*given, num_classes=num, **rule).total

    hidden, kernel = (jnp.asarray(x, jnp.float32) for x in (HIDDEN, KERNEL))
    own = kernel.at[:, VOCAB - 7 :].mul(3)
    grad = jax.value_and_grad(total, (0, 1))
    loss, (by_hidden, by_kernel) = grad(hidden, own, VOCAB - 7)
    right, (to_hidden, to_kernel) = grad(hidden, kernel[:, : VOCAB - 7], None)
    assert float(loss) == pytest.approx(float(right), rel=1e-6)
    np.testing.assert_allclose(by_hidden, to_hidden, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(by_kernel[:, :-7], to_kernel, rtol=1e-4, atol=1e-5)
    assert not np.asarray(by_kernel[:, -7:]).any()


def test_gradients_are_those_of_a_scaled_loss():
    def mean(hidden: jax.Array) -> jax.Array:
        found = cross_entropy(hidden, jnp.asarray(KERNEL), jnp.asarray(TARGETS))
        return 3 * found.total / found.weight

    def plain(hidden: jax.Array) -> jax.Array:
        logits = hidden @ jnp.asarray(KERNEL)
        own = jnp.take_along_axis(logits, jnp.asarray(TARGETS)[..., None], -1)[..., 0]
        return 3 * (jax.nn.logsumexp(logits, -1) - own).mean()

    hidden = jnp.asarray(HIDDEN, jnp.float32)
    wanted = jax.grad(plain)(hidden)
    np.testing.assert_allclose(jax.grad(mean)(hidden), wanted, rtol=1e-4, atol=1e-7)


def as_torch(hidden: jax.Array, kernel: jax.Array) -> jax.Array:
    """What PyTorch does in half precision: logits rounded, the loss of them in fp32."""
    logits = (hidden @ kernel).astype(jnp.float32)
    own = jnp.take_along_axis(logits, jnp.asarray(TARGETS)[..., None], -1)[..., 0]
    return ((jax.nn.logsumexp(logits, -1) - own) * jnp.asarray(WEIGHTS)).sum()


@pytest.mark.parametrize("logits_dtype", [None, jnp.float32])
def test_half_precision_is_no_further_from_the_truth_than_whole_logits(
    logits_dtype: Any,
):
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (HIDDEN, KERNEL)]
    wanted, wanted_grads = reference(*(np.asarray(x, np.float64) for x in arrays))
    loss, grads = loss_and_grads(jnp.bfloat16, num_chunks=4, logits_dtype=logits_dtype)
    plain, plain_grads = jax.value_and_grad(as_torch, (0, 1))(*arrays)
    assert abs(float(loss) - wanted) <= abs(float(plain) - wanted) + 1e-6 * wanted
    for found, other, expected in zip(grads, plain_grads, wanted_grads, strict=False):
        assert distance(found, expected) <= 1.02 * distance(other, expected)


def test_gradients_of_fp16_do_not_vanish():
    """Of a vocabulary whose shares are below what fp16 can hold."""
    hidden = jnp.zeros((1, 4, 8), jnp.float16).at[..., 0].set(1)
    kernel = jnp.zeros((8, 64), jnp.float16).at[0, 0].set(17).at[1, 5].set(1)
    targets = jnp.zeros((1, 4), int)

    def total(hidden: jax.Array) -> jax.Array:
        return 1e4 * cross_entropy(hidden, kernel, targets).total

    grad = jax.grad(total)(hidden)
    assert grad.dtype == jnp.float16
    np.testing.assert_allclose(grad[..., 1], 1e4 * np.exp(-17), rtol=2e-2)


def test_whole_logits_are_in_no_program():
    shape = (4, 256, 16), (16, 4096)
    whole = 4 * 256 * 4096 * 4

    def temporaries(num_chunks: int) -> int:
        def total(hidden: jax.Array, kernel: jax.Array) -> jax.Array:
            targets = jnp.zeros(hidden.shape[:2], int)
            return cross_entropy(hidden, kernel, targets, num_chunks=num_chunks).total

        given = [jax.ShapeDtypeStruct(each, jnp.float32) for each in shape]
        step = jax.jit(jax.grad(total, (0, 1)))
        return step.lower(*given).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(1) > whole
    assert temporaries(16) < whole / 4


def test_loss_without_gradients_multiplies_once():
    def total(hidden: jax.Array) -> jax.Array:
        kernel, targets = jnp.asarray(KERNEL, jnp.float32), jnp.asarray(TARGETS)
        return cross_entropy(hidden, kernel, targets).total

    hidden = jnp.asarray(HIDDEN, jnp.float32)
    assert str(jax.make_jaxpr(total)(hidden)).count("dot_general") == 1
    assert str(jax.make_jaxpr(jax.grad(total))(hidden)).count("dot_general") == 3


@pytest.mark.parametrize("data", [1, 2])
def test_vocabulary_is_split_over_tensor_and_no_logits_are_moved(data: int):
    """With rows that the compiler places, too: then there is one chunk.

    With a bias, which is split as the vocabulary is.
    """
    mesh = make_mesh(MeshShape(data=data, tensor=4), jax.devices()[: 4 * data])

    def total(
        hidden: jax.Array, kernel: jax.Array, bias: jax.Array, targets: jax.Array
    ) -> jax.Array:
        how = {"bias_V": bias, "num_chunks": 2}
        return cross_entropy(hidden, kernel, targets, **how).total

    specs = P("data"), P(None, "tensor"), P("tensor"), P("data")
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    rows = np.concatenate([HIDDEN, HIDDEN[:1]]), np.concatenate([TARGETS, TARGETS[:1]])
    arrays = (x.astype(np.float32) for x in (rows[0], KERNEL, BIAS))
    given = *arrays, rows[1]
    placed = jax.device_put(given, shardings)
    with jax.set_mesh(mesh):
        grads = jax.jit(
            jax.value_and_grad(total, (0, 1, 2)), out_shardings=(None, shardings[:3])
        )
        compiled = grads.lower(*placed).compile()
        loops = str(jax.make_jaxpr(total)(*given)).count("scan[")
    assert loops == (1 if data == 1 else 0)
    loss, found = compiled(*placed)
    wanted, expected = jax.value_and_grad(total, (0, 1, 2))(*map(jnp.asarray, given))
    assert float(loss) == pytest.approx(float(wanted), rel=1e-6)
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)
    moved = [
        line.partition(" = ")[2]
        for line in compiled.as_text().splitlines()
        if " all-gather(" in line or " all-to-all(" in line
    ]
    assert not [
        line for line in moved if f"{VOCAB}]" in line or f"{VOCAB // 4}]" in line
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hidden_BTD": jnp.zeros((8, 16))}, r"hidden_BTD \(8, 16\) and kernel_DV"),
        ({"kernel_DV": jnp.zeros((40, 16))}, "a table of embeddings is transposed"),
        ({"targets_BT": jnp.zeros((3, 7), int)}, r"targets_BT \(3, 7\) must have one"),
        ({"weights_BT": jnp.zeros((3, 9))}, r"weights_BT \(3, 9\) must have one"),
        ({"bias_V": jnp.zeros(39)}, r"bias_V \(39,\) must have one entry for each c"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0 must be at least 0 and below"),
        ({"soft_cap": 0.0}, "soft_cap=0.0 must be above 0"),
        ({"num_chunks": 3}, "num_chunks=3 must divide the 8 tokens"),
        ({"num_chunks": 0}, "num_chunks=0 must divide"),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_what_does_not_fit_is_refused(given: dict, message: str):
    arrays = {
        "hidden_BTD": jnp.asarray(HIDDEN, jnp.float32),
        "kernel_DV": jnp.asarray(KERNEL, jnp.float32),
        "targets_BT": jnp.asarray(TARGETS),
    }
    with pytest.raises(ValueError, match=message):
        cross_entropy(**{**arrays, **given})


def test_tokens_that_an_axis_does_not_divide_are_refused():
    hidden, kernel = jnp.zeros((2, 7, 4)), jnp.zeros((4, 8))
    mesh = make_mesh(MeshShape(tensor=2), jax.devices()[:2])
    with (
        jax.set_mesh(mesh),
        pytest.raises(
            ValueError, match=r"tokens_axis='tensor' has 2 devices, .* 7 tok"
        ),
    ):
        cross_entropy(hidden, kernel, jnp.zeros((2, 7), int), tokens_axis="tensor")
