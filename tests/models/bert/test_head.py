"""What comes after a BERT's blocks: is it what NumPy computes?"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.models.bert.config import BertConfig
from jaxpar.models.bert.head import BertHead

SMALL = {"vocab_size": 11, "seq_len": 6, "num_layers": 1, "num_heads": 2, "width": 8}
RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(2, 5, 8)) * 3 + 1


def make_head(task: str, **fields: Any) -> Any:
    """A head whose every parameter is random."""
    config = BertConfig(**SMALL, task=task, num_labels=3, **fields)
    head: Any = BertHead(config, rngs=nnx.Rngs(0, dropout=1))
    for param in jax.tree.leaves(nnx.state(head, nnx.Param), is_leaf=_is_param):
        param[...] = jnp.asarray(RNG.normal(size=param.shape), jnp.float32)
    return head


def _is_param(x: Any) -> bool:
    return isinstance(x, nnx.Param)


def affine(linear: Any, x: np.ndarray) -> np.ndarray:
    kernel, bias = (
        np.asarray(p[...], np.float64) for p in (linear.kernel, linear.bias)
    )
    return x @ kernel + bias


def word_logits(words: Any) -> np.ndarray:
    x = affine(words.dense, HIDDEN)
    x = x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-12)
    x = x * np.asarray(words.norm.scale[...]) + np.asarray(words.norm.bias[...])
    return x @ np.asarray(words.logits.table[...]).T + np.asarray(words.bias[...])


def close(got: Any, right: Any) -> None:
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-4)


def hidden(dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(HIDDEN, dtype)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_words_and_sentences_equal_numpy(sequence_parallel: bool):
    head = make_head("pretraining", sequence_parallel=sequence_parallel)
    words, sentences = head(hidden())
    close(words, word_logits(head.words))
    pooled = np.tanh(affine(head.pooler.dense, HIDDEN[:, 0]))
    close(sentences, affine(head.sentence, pooled))


def test_loss_of_words_is_that_of_their_logits():
    head = make_head("masked")
    labels, weights = RNG.integers(0, 11, (2, 5)), RNG.random((2, 5))
    got = head(
        hidden(),
        labels_BT=jnp.asarray(labels),
        weights_BT=jnp.asarray(weights, jnp.float32),
    )
    logits = word_logits(head.words)
    own = np.take_along_axis(logits, labels[..., None], -1)[..., 0]
    losses = np.log(np.exp(logits).sum(-1)) - own
    close(got, (losses * weights).sum())


def test_classes_equal_numpy():
    rows, tokens = make_head("sequence"), make_head("tokens")
    pooled = np.tanh(affine(rows.pooler.dense, HIDDEN[:, 0]))
    close(rows(hidden()), affine(rows.classifier, pooled))
    close(tokens(hidden()), affine(tokens.classifier, HIDDEN))
    assert tokens.pooler is None


def test_logits_of_half_precision_are_fp32():
    for task in ("pretraining", "sequence"):
        state = make_head(task)
        halves = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(state))
        nnx.update(state, halves)
        found = jax.tree.leaves(state(hidden(jnp.bfloat16)))
        assert {x.dtype for x in found} == {jnp.dtype(jnp.float32)}


def test_only_classifiers_drop():
    assert make_head("pretraining", dropout=0.5).dropout is None
    head = make_head("tokens", dropout=0.5)
    got = np.asarray(head(hidden()))
    assert not np.allclose(got, affine(head.classifier, HIDDEN))
