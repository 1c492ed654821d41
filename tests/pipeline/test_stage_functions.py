"""Are a micro-batch's embedding, blocks and loss those of the plain model?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.toys import TIE
from tests.pipeline.parts import (
    ACCUMULATE,
    FIRST,
    INPUTS,
    KEY,
    PARAMS,
    make_functions,
    microbatch,
    plain_block,
    plain_total,
)


@pytest.mark.parametrize("index", range(ACCUMULATE))
def test_microbatch_is_every_other_row(index):
    rows = make_functions().rows(INPUTS, jnp.int32(index))
    jax.tree.map(np.testing.assert_array_equal, rows.batch, microbatch(index))


def test_embedding_is_of_the_micro_batchs_tokens():
    found = make_functions().embed(PARAMS["embed"], INPUTS, jnp.int32(1), KEY)
    right = PARAMS["embed"]["table"][microbatch(1)["tokens"]]
    np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize(
    ("virtual", "run"), [(0, [0, 1]), (1, [2, 3]), (2, [4]), (3, [5])]
)
def test_places_are_those_of_the_virtual_stages_blocks(virtual, run):
    functions = make_functions(num_blocks=6, stages=2, chunks=2)
    (numbers, is_run), (call, key) = functions.places(
        jnp.int32(virtual), INPUTS, jnp.int32(1), KEY
    )
    assert numbers[is_run].tolist() == run
    assert len(is_run) == 2
    np.testing.assert_array_equal(call.args[0], microbatch(1)["tokens"])
    assert key.key == jax.random.fold_in(KEY.key, 1), "of the micro-batch"


@pytest.mark.parametrize("is_run", [True, False])
def test_block_runs_in_its_place_and_an_idle_place_passes_on(is_run):
    functions = make_functions(num_blocks=3, stages=2)
    block = {part: {k: x[2] for k, x in leaves.items()}
             for part, leaves in PARAMS["blocks"].items()}  # fmt: skip
    if not is_run:
        block["down"]["bias"] = np.full_like(block["down"]["bias"], np.nan)

    @jax.jit
    def run(block, hidden, is_run):
        _, others = functions.places(jnp.int32(1), INPUTS, FIRST, KEY)
        block_of = functions.block_on(functions.rows(INPUTS, FIRST))
        return block_of(block, hidden, jnp.int32(2), is_run, *others)

    hidden = PARAMS["embed"]["table"][microbatch(0)["tokens"]]
    right = plain_block(block, hidden) if is_run else hidden
    np.testing.assert_allclose(run(block, hidden, is_run), right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tied", [(), TIE])
def test_losses_of_the_micro_batches_are_the_plain_models(tied):
    functions = make_functions(tied=tied)
    params = PARAMS | ({"head": {}} if tied else {})

    @jax.jit
    def run(params, index):
        hidden = functions.embed(params["embed"], INPUTS, index, KEY)
        for layer in range(functions.network.num_blocks):
            own = jax.tree.map(lambda x, i=layer: x[i], params["blocks"])
            hidden = plain_block(own, hidden)
        shared = params["head"], functions.network.tied(params["embed"])
        return functions.head(shared, hidden, INPUTS, index, KEY).loss

    losses = [run(params, jnp.int32(index)) for index in range(ACCUMULATE)]
    assert sum(float(x.weight) for x in losses) == len(INPUTS.batch["tokens"])
    total = sum(float(x.total) for x in losses)
    assert total == pytest.approx(float(plain_total(params)), rel=1e-5)


@pytest.mark.parametrize(("remat", "again"), [("none", 0), ("full", 0), ("dots", 1)])
def test_full_remat_is_left_to_the_backward_of_the_chunk(remat, again):
    """Which runs a chunk from its input: its blocks would run a third time."""
    functions = make_functions(remat=remat)

    def run(block, hidden):
        own, others = functions.places(FIRST, INPUTS, FIRST, KEY)
        block_of = functions.block_on(functions.rows(INPUTS, FIRST))
        return block_of(block, hidden, *(x[0] for x in own), *others)

    block = jax.tree.map(lambda x: x[0], PARAMS["blocks"])
    hidden = PARAMS["embed"]["table"][microbatch(0)["tokens"]]
    assert ("remat" in str(jax.make_jaxpr(run)(block, hidden))) == bool(again)
