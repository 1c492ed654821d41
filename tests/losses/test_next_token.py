"""Is the loss of logits the sum over targets that NumPy computes?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.losses import next_token_loss

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 11, size=(3, 6))
LOGITS = RNG.normal(size=(3, 5, 11)).astype(np.float32) * 4


def predict(tokens_BT: jax.Array) -> jax.Array:
    assert tokens_BT.shape == (3, 5)
    return jnp.asarray(LOGITS)


def reference_losses(logits: np.ndarray = LOGITS) -> np.ndarray:
    """Cross entropies of the targets, [B, T], in fp64."""
    logits = logits.astype(np.float64)
    log_sum = np.log(np.exp(logits).sum(-1))
    rows, columns = np.indices((3, 5))
    return log_sum - logits[rows, columns, TOKENS[:, 1:]]


def test_loss_equals_numpy():
    loss = next_token_loss(predict, {"tokens": jnp.asarray(TOKENS)})
    assert float(loss.total) == pytest.approx(reference_losses().sum(), rel=1e-5)
    assert float(loss.weight) == 15.0


@pytest.mark.parametrize("dtype", [np.float32, np.int32, bool])
def test_loss_weighs_targets(dtype: type):
    weights = (RNG.random((3, 5)) * 3).astype(dtype)
    batch = {"tokens": jnp.asarray(TOKENS), "weights": jnp.asarray(weights)}
    loss = next_token_loss(predict, batch)
    want = (reference_losses() * weights).sum()
    assert float(loss.total) == pytest.approx(want, rel=1e-5)
    assert float(loss.weight) == pytest.approx(weights.sum(), rel=1e-6)
    assert loss.total.dtype == loss.weight.dtype == jnp.float32


def test_loss_of_half_precision_logits_is_taken_in_fp32():
    def predict_half(tokens_BT: jax.Array) -> jax.Array:
        return predict(tokens_BT).astype(jnp.bfloat16)

    loss = next_token_loss(predict_half, {"tokens": jnp.asarray(TOKENS)})
    want = reference_losses(np.asarray(jnp.asarray(LOGITS, jnp.bfloat16)))
    assert float(loss.total) == pytest.approx(want.sum(), rel=1e-5)


def test_loss_of_large_logits_does_not_overflow():
    loss = next_token_loss(
        lambda tokens: 1000 * predict(tokens), {"tokens": jnp.asarray(TOKENS)}
    )
    assert np.isfinite(float(loss.total))


SEGMENTS = np.array([[1, 1, 1, 2, 2, 2], [1, 1, 2, 3, 3, 0], [1, 2, 2, 2, 0, 0]])


def predict_packed(tokens_BT: jax.Array, **given: jax.Array) -> jax.Array:
    """Check what the model gets of a packed batch."""
    assert set(given) == {"segment_ids_BT", "positions_BT"}
    assert (given["segment_ids_BT"] == SEGMENTS[:, :-1]).all()
    assert (given["positions_BT"] == 10 * SEGMENTS[:, :-1]).all()
    return predict(tokens_BT)


@pytest.mark.parametrize("weighed", [False, True])
def test_loss_is_of_targets_of_the_same_segment(weighed: bool):
    same = np.array([[1, 1, 0, 1, 1], [1, 0, 0, 1, 0], [0, 1, 1, 0, 0]])
    weights = (
        (RNG.random((3, 5)) * 3).astype(np.float32) if weighed else np.ones((3, 5))
    )
    arrays = {"tokens": TOKENS, "segment_ids": SEGMENTS, "positions": 10 * SEGMENTS}
    if weighed:
        arrays["weights"] = weights
    loss = next_token_loss(predict_packed, jax.tree.map(jnp.asarray, arrays))
    want = (reference_losses() * weights * same).sum()
    assert float(loss.total) == pytest.approx(want, rel=1e-5)
    assert float(loss.weight) == pytest.approx((weights * same).sum(), rel=1e-6)


@pytest.mark.parametrize("name", ["segment_ids", "positions"])
def test_loss_with_a_segment_per_target_raises(name: str):
    batch = {"tokens": jnp.asarray(TOKENS), name: jnp.asarray(SEGMENTS[:, 1:])}
    with pytest.raises(
        ValueError, match=rf"'{name}' has shape \(3, 5\), but 'tokens' \(3, 6\)"
    ):
        next_token_loss(predict, batch)


def test_mask_is_one_segment_whose_positions_count_its_tokens():
    mask = np.array([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    counted = [[0, 1, 2, 3, 4], [0, 0, 0, 1, 2], [0, 1, 2, 2, 2]]

    def predict_padded(tokens_BT: jax.Array, **given: jax.Array) -> jax.Array:
        assert (given["segment_ids_BT"] == mask[:, :-1]).all()
        assert (given["positions_BT"] == np.array(counted)).all()
        return predict(tokens_BT)

    batch = {"tokens": jnp.asarray(TOKENS), "attention_mask": jnp.asarray(mask)}
    loss = next_token_loss(predict_padded, batch)
    learned = mask[:, 1:] * mask[:, :-1]
    assert float(loss.total) == pytest.approx((reference_losses() * learned).sum())
    assert float(loss.weight) == 10


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"segment_ids": jnp.ones((3, 6), int)}, "'attention_mask' and 'segment_ids'"),
        ({"attention_mask": jnp.ones((3, 5))}, r"'attention_mask' has shape \(3, 5\)"),
    ],
)
def test_mask_beside_segments_or_of_another_shape_raises(given: dict, message: str):
    batch = {"tokens": jnp.asarray(TOKENS), "attention_mask": jnp.ones((3, 6))}
    with pytest.raises(ValueError, match=message):
        next_token_loss(predict, {**batch, **given})


def test_loss_without_tokens_raises():
    with pytest.raises(ValueError, match=r"has \['inputs'\], but the loss reads"):
        next_token_loss(predict, {"inputs": jnp.asarray(TOKENS)})


def test_loss_with_a_weight_per_token_raises():
    batch = {"tokens": jnp.asarray(TOKENS), "weights": jnp.ones((3, 6))}
    with pytest.raises(
        ValueError, match=r"'weights' has shape \(3, 6\), .* targets of shape \(3, 5\)"
    ):
        next_token_loss(predict, batch)
