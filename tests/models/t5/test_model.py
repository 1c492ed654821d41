"""Does a T5 compute what NumPy does, with padding and with packed rows?"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.model.network import WholeModel
from jaxpar.models import T5Config, make_t5
from jaxpar.models.t5.config import num_params
from jaxpar.tree import named_leaves
from tests.models.t5.reference import logits_of_row

SMALL = T5Config(
    vocab_size=17,
    num_layers=2,
    num_decoder_layers=3,
    num_heads=2,
    width=8,
    head_width=6,
    mlp_width=12,
    num_buckets=8,
    max_distance=9,
)
FIRST = dataclasses.replace(SMALL, activation="relu", tied_embedding=True)
rng = np.random.default_rng(0)
READ, WRITTEN = rng.integers(0, 17, (2, 11)), rng.integers(0, 17, (2, 7))


@functools.cache  # What is traced for a model is kept for that very object.
def at_random(config: T5Config) -> WholeModel:
    """A model whose every parameter is random: norms begin at 1."""
    model = make_t5(config).init(0, READ, WRITTEN)
    leaves, treedef = jax.tree.flatten(model.params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    drawn = [
        leaf + 0.3 * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return model.with_params(jax.tree.unflatten(treedef, drawn))


def expected(model: WholeModel, config: T5Config, segments: tuple) -> np.ndarray:
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), model.params)
    rows = zip(READ, WRITTEN, *segments, strict=True)
    return np.stack([logits_of_row(params, config, *row) for row in rows])


@jax.jit
def call(model: WholeModel, keywords: dict[str, Any]) -> jax.Array:
    return model(jnp.asarray(READ), jnp.asarray(WRITTEN), **keywords)


ONES = np.ones_like(READ), np.ones_like(WRITTEN)
PACKED = (
    np.array([[1] * 4 + [2] * 6 + [0], [1] * 9 + [2] * 2]),
    np.array([[1] * 3 + [2] * 2 + [0] * 2, [1] + [2] * 6]),
)


@pytest.mark.parametrize("config", [SMALL, FIRST], ids=["1.1", "first"])
def test_logits_are_numpys(config: T5Config) -> None:
    model = at_random(config)
    found = call(model, {})
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected(model, config, ONES), atol=2e-5)


def test_padding_of_inputs_is_not_attended_to() -> None:
    model, mask = at_random(SMALL), np.array([[1] * 8 + [0] * 3, [1] * 11])
    found = call(model, {"segment_ids_BS": mask})
    right = expected(model, SMALL, (mask, ONES[1]))
    np.testing.assert_allclose(found, right, atol=2e-5)


def test_packed_examples_see_their_own_tokens() -> None:
    model = at_random(SMALL)
    names = "segment_ids_BS", "decoder_segment_ids_BT"
    found = call(model, dict(zip(names, PACKED, strict=True)))
    right = expected(model, SMALL, PACKED)
    np.testing.assert_allclose(found, right, atol=2e-5)


@pytest.mark.parametrize("config", [SMALL, FIRST], ids=["1.1", "first"])
def test_the_closed_form_counts_the_leaves(config: T5Config) -> None:
    model = make_t5(config)
    shapes = jax.eval_shape(lambda: model.init(0, READ, WRITTEN).params)
    leaves = named_leaves(shapes)
    assert sum(x.size for x in leaves.values()) == num_params(config)
    assert "head/logits/table" not in leaves, "a tied table is stored once"


def test_one_table_serves_all_blocks_of_a_stack() -> None:
    """Its gradient is that of a number added to every block's scores of the bucket."""
    model = at_random(SMALL)

    def total(table: jax.Array) -> jax.Array:
        params = dict(model.params)
        params["embed"] = {**params["embed"], "encoder_bias": table}
        logits = call(model.with_params(params), {})
        return jnp.sum(jnp.sin(logits))

    table = model.params["embed"]["encoder_bias"]
    found = jax.jit(jax.grad(total))(table)
    totals, step = jax.jit(total), 1e-2
    for at in ((0, 1), (3, 0), (6, 1)):
        change = jnp.zeros_like(table).at[at].set(step)
        slope = (totals(table + change) - totals(table - change)) / (2 * step)
        assert float(found[at]) == pytest.approx(float(slope), rel=2e-2, abs=2e-3)
