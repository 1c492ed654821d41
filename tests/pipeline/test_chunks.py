"""Is a chunk run forwards and backwards as its blocks one after another would be?"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.pipeline.chunks import Chunks, ChunkWork
from jaxpar.pipeline.stage_functions import SectionFunctions
from tests.model.toys import LENGTH, ROWS, WIDTH
from tests.pipeline.parts import (
    ACCUMULATE,
    FIRST,
    INPUTS,
    KEY,
    PARAMS,
    cut,
    make_block_functions,
    plain_block,
)

SHAPE = ROWS // ACCUMULATE, LENGTH, WIDTH
HIDDEN, COTANGENT = (jax.random.normal(jax.random.key(i), SHAPE) for i in (2, 3))
PLACES = 2


@functools.cache
def functions() -> SectionFunctions:
    """Three blocks on two stages: the second one's last place is idle."""
    return make_block_functions(cut(num_blocks=3, stages=2))


@functools.cache
def blocks_of(stage: int) -> Any:
    """A stage's blocks; an idle place has a copy of the last one."""
    order = np.array([[0, 1], [2, 2]][stage])
    return jax.tree.map(lambda x: np.asarray(x)[order], PARAMS["blocks"])


def work(stage: int) -> ChunkWork:
    return ChunkWork(jnp.int32(stage), INPUTS, FIRST, KEY)


def plain_chunk(stage: int, blocks, hidden):
    for layer in range([2, 1][stage]):
        own = jax.tree.map(lambda x, i=layer: x[i], blocks)
        hidden = plain_block(own, hidden)
    return hidden


@functools.partial(jax.jit, static_argnums=0)
def plain_gradients(stage: int, blocks):
    return jax.vjp(functools.partial(plain_chunk, stage), blocks, HIDDEN)[1](COTANGENT)


@pytest.mark.parametrize(("keeps", "stage"), [(False, 0), (True, 1)])
def test_forward_runs_the_blocks_in_turn(keeps, stage):
    chunks = Chunks(functions(), keeps=keeps, splits=False)
    run = jax.jit(lambda blocks, hidden: chunks.forward(blocks, hidden, work(stage)))
    out, kept, state = run(blocks_of(stage), HIDDEN)
    right = plain_chunk(stage, blocks_of(stage), HIDDEN)
    np.testing.assert_allclose(out, right, rtol=1e-5, atol=1e-6)
    assert bool(kept) == keeps
    assert state == {}
    assert all(x.shape[0] == PLACES for x in kept)


@pytest.mark.parametrize(
    ("keeps", "splits", "stage"),
    [(False, False, 0), (False, True, 1), (True, False, 1), (True, True, 0)],
)
def test_backward_gives_the_gradients_of_the_plain_blocks(keeps, splits, stage):
    """What `backward` defers, `weights` computes; an idle place has zeros."""
    chunks, blocks = Chunks(functions(), keeps=keeps, splits=splits), blocks_of(stage)

    @jax.jit
    def run(blocks, hidden, cotangent):
        _, kept, _ = chunks.forward(blocks, hidden, work(stage))
        # What is kept replaces the input.
        hidden = hidden * jnp.nan if keeps else hidden
        grads, back, products = chunks.backward(
            blocks, hidden, kept, cotangent, work(stage)
        )
        if not splits:
            return grads, back, None
        return grads, back, chunks.weights(blocks, hidden, products, work(stage))

    grads, back, late = run(blocks, HIDDEN, COTANGENT)
    if splits:
        assert not np.any(grads["up"]["kernel"]), "left to weights"
        grads = jax.tree.map(jnp.add, grads, late)
    right, right_back = plain_gradients(stage, blocks)
    np.testing.assert_allclose(back, right_back, rtol=1e-5, atol=1e-6)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("splits", [False, True])
def test_backward_gives_gradients_of_trained_leaves_alone(keeps, splits):
    whole, frozen = functions().whole, {"blocks/up/kernel", "blocks/down/bias"}
    whole = dataclasses.replace(whole, trained=whole.trained - frozen)
    own = dataclasses.replace(functions(), whole=whole)
    chunks, blocks = Chunks(own, keeps=keeps, splits=splits), blocks_of(0)

    @jax.jit
    def run(blocks):
        _, kept, _ = chunks.forward(blocks, HIDDEN, work(0))
        grads, back, products = chunks.backward(
            blocks, HIDDEN, kept, COTANGENT, work(0)
        )
        if splits:
            late = chunks.weights(blocks, HIDDEN, products, work(0))
            grads = jax.tree.map(jnp.add, grads, late)
        return kept, grads, back

    kept, grads, back = run(blocks)
    assert not {x.shape for x in kept} & {x.shape for x in jax.tree.leaves(blocks)}
    right, right_back = plain_gradients(0, blocks)
    np.testing.assert_allclose(back, right_back, rtol=1e-5, atol=1e-6)
    del right["up"]["kernel"], right["down"]["bias"]
    assert jax.tree.structure(grads) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_evaluation_keeps_nothing():
    whole = dataclasses.replace(functions().whole, training=False)
    evaluated = dataclasses.replace(functions(), whole=whole)
    chunks = Chunks(evaluated, keeps=True, splits=False)
    run = functools.partial(chunks.forward, work=work(0))
    assert jax.eval_shape(run, blocks_of(0), HIDDEN)[1] == []
