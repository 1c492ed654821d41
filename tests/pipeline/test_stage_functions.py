"""Are a micro-batch's embedding, blocks and loss those of the plain model?"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.pipeline.stage_functions import SectionFunctions
from jaxpar.pipeline.stages import divide
from jaxpar.step.inputs import make_inputs
from jaxpar.step.row_draws import AsTraced, OwnRows, ShardKey
from jaxpar.tree import merged, named_leaves, parted
from tests.model import two_sections
from tests.model.toys import BATCHES, LENGTH, ROWS, TIE, WIDTH
from tests.model.two_sections import NARROW, PARTS
from tests.pipeline.parts import (
    ACCUMULATE,
    FIRST,
    INPUTS,
    KEY,
    PARAMS,
    cut,
    functions_of,
    make_block_functions,
    make_functions,
    make_network,
    microbatch,
    plain_block,
    plain_total,
)


@pytest.mark.parametrize("index", range(ACCUMULATE))
def test_microbatch_is_every_other_row(index):
    rows = make_functions().rows(INPUTS, jnp.int32(index))
    jax.tree.map(np.testing.assert_array_equal, rows.batch, microbatch(index))


def test_embedding_is_of_the_micro_batchs_tokens():
    given = (PARAMS["embed"], {}), INPUTS, jnp.int32(1), KEY
    found, state = make_functions().embed(*given)
    assert state == {}
    right = PARAMS["embed"]["table"][microbatch(1)["tokens"]]
    np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize(
    ("virtual", "run"), [(0, [0, 1]), (1, [2, 3]), (2, [4]), (3, [5])]
)
def test_places_are_those_of_the_virtual_stages_blocks(virtual, run):
    functions = make_block_functions(cut(num_blocks=6, stages=2, chunks=2))
    (numbers, is_run), (call, key) = functions.places(
        jnp.int32(virtual), INPUTS, jnp.int32(1), KEY
    )
    assert numbers[is_run].tolist() == run
    assert len(is_run) == 2
    np.testing.assert_array_equal(call.args[0], microbatch(1)["tokens"])
    assert key.key == jax.random.fold_in(KEY.key, 1), "of the micro-batch"


@pytest.mark.parametrize("is_run", [True, False])
def test_block_runs_in_its_place_and_an_idle_place_passes_on(is_run):
    functions = make_block_functions(cut(num_blocks=3, stages=2))
    block = {part: {k: x[2] for k, x in leaves.items()}
             for part, leaves in PARAMS["blocks"].items()}  # fmt: skip
    if not is_run:
        block["down"]["bias"] = np.full_like(block["down"]["bias"], np.nan)

    @jax.jit
    def run(block, hidden, is_run):
        _, others = functions.places(jnp.int32(1), INPUTS, FIRST, KEY)
        block_of = functions.block_on(functions.whole.rows(INPUTS, FIRST))
        return block_of(block, hidden, {}, {}, jnp.int32(2), is_run, *others)[0]

    hidden = PARAMS["embed"]["table"][microbatch(0)["tokens"]]
    right = plain_block(block, hidden) if is_run else hidden
    np.testing.assert_allclose(run(block, hidden, is_run), right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tied", [(), TIE])
def test_losses_of_the_micro_batches_are_the_plain_models(tied):
    functions = make_functions(tied=tied)
    params = PARAMS | ({"head": {}} if tied else {})

    @jax.jit
    def run(params, index):
        hidden, _ = functions.embed((params["embed"], {}), INPUTS, index, KEY)
        for layer in range(functions.network.num_blocks):
            own = jax.tree.map(lambda x, i=layer: x[i], params["blocks"])
            hidden = plain_block(own, hidden)
        shared = params["head"], functions.network.tied(params["embed"])
        return functions.head((shared, {}), hidden, INPUTS, index, KEY)[0].loss

    losses = [run(params, jnp.int32(index)) for index in range(ACCUMULATE)]
    assert sum(float(x.weight) for x in losses) == len(INPUTS.batch["tokens"])
    total = sum(float(x.total) for x in losses)
    assert total == pytest.approx(float(plain_total(params)), rel=1e-5)


@pytest.mark.parametrize(("remat", "again"), [("none", 0), ("full", 0), ("dots", 1)])
def test_full_remat_is_left_to_the_backward_of_the_chunk(remat, again):
    """Which runs a chunk from its input: its blocks would run a third time."""
    functions = make_block_functions(cut(), remat=remat)

    def run(block, hidden):
        own, others = functions.places(FIRST, INPUTS, FIRST, KEY)
        block_of = functions.block_on(functions.whole.rows(INPUTS, FIRST))
        return block_of(block, hidden, {}, {}, *(x[0] for x in own), *others)

    block = jax.tree.map(lambda x: x[0], PARAMS["blocks"])
    hidden = PARAMS["embed"]["table"][microbatch(0)["tokens"]]
    assert ("remat" in str(jax.make_jaxpr(run)(block, hidden))) == bool(again)


class Dropping(two_sections.Projecting):
    def __init__(self, width: int, rngs: nnx.Rngs):
        super().__init__(width, NARROW, rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(super().__call__(x))


def of_narrow_section(num_shards: int = 1) -> SectionFunctions:
    """Of a section in which each block draws masks, as does the part before it."""
    parts = {"narrowing": partial(Dropping, WIDTH), "narrow": partial(Dropping, NARROW)}
    functions = functions_of(two_sections.make_network({**PARTS, **parts}))
    draws = OwnRows(num_shards) if num_shards > 1 else AsTraced()
    whole = dataclasses.replace(functions, draws=draws)
    division = divide(two_sections.COUNTS, 2, 1)
    return SectionFunctions(whole, whole.network.sections[1], division.sections[1])


def test_hidden_states_before_a_section_are_those_its_predecessor_returns():
    functions = of_narrow_section().whole
    rows = functions.rows(INPUTS, FIRST)
    wide, narrow = functions.network.sections
    found = [functions.hidden_of(rows, before) for before in (wide, narrow, None)]
    assert [x.shape[-1] for x in found] == [WIDTH, WIDTH, NARROW]
    assert {x.shape[:-1] for x in found} == {(ROWS // ACCUMULATE, LENGTH)}


def masks(own: SectionFunctions, rows: int, shard: int) -> list:
    """What is left of ones after the part between, and after a block."""
    batch = {name: jnp.asarray(x[:rows]) for name, x in BATCHES[0].items()}
    inputs, key = make_inputs(batch, FIRST), ShardKey(KEY.key, jnp.int32(shard))
    num = rows // ACCUMULATE, LENGTH

    def ones(width: int) -> dict:
        shapes = {"kernel": jnp.zeros((width, NARROW)), "bias": jnp.ones(NARROW)}
        return {"out": shapes}

    @jax.jit
    def run() -> tuple:
        hidden = jnp.ones((*num, WIDTH))
        entered, _ = own.between((ones(WIDTH), {}), hidden, inputs, FIRST, key)
        places, others = own.places(FIRST, inputs, FIRST, key)
        block = own.block_on(own.whole.rows(inputs, FIRST))
        first = jax.tree.map(lambda x: x[0], places)
        hidden = jnp.ones((*num, NARROW))
        return entered, block(ones(NARROW), hidden, {}, {}, *first, *others)[0]

    return [np.asarray(x) for x in run()]


def test_sections_draw_on_data_shards_what_one_device_draws():
    """The part between and a block of the narrow section: their rows of its masks."""
    whole = masks(of_narrow_section(), ROWS, 0)
    shards = [masks(of_narrow_section(2), ROWS // 2, shard) for shard in (0, 1)]
    for place, right in enumerate(whole):
        found = np.concatenate([shard[place] for shard in shards])
        np.testing.assert_array_equal(found, right)
        assert set(np.unique(right)) == {0.0, 2.0}
    assert not np.array_equal(*whole)


@pytest.mark.parametrize("frozen", [(), ("embed/table",), ("blocks/up/kernel",)])
def test_parameters_are_parted_into_trained_and_frozen_ones(frozen):
    functions = functions_of(make_network(tied=TIE), frozen=frozen)
    for part in ("embed", "blocks", "head"):
        params = {} if part == "head" else PARAMS[part]
        trained, others = functions.parted(part, params)
        names = {f"{part}/{name}" for name in named_leaves(others)}
        assert names == {name for name in frozen if name.startswith(part)}
        jax.tree.map(np.testing.assert_array_equal, merged(trained, others), params)
    table = jnp.asarray(PARAMS["embed"]["table"])
    tied, other = functions.parted_head(({"scale": table}, {"table": table}))
    shared = {"table": table}
    is_frozen = "embed/table" in frozen
    assert (tied[1], other[1]) == (({}, shared) if is_frozen else (shared, {}))


def test_block_has_its_frozen_parameters_as_an_argument_of_their_own():
    functions = make_block_functions(cut())
    block = jax.tree.map(lambda x: x[0], PARAMS["blocks"])
    trained, frozen = parted(block, ["up/bias", "down/kernel"])
    hidden = PARAMS["embed"]["table"][microbatch(0)["tokens"]]

    @jax.jit
    def run(trained, frozen):
        (number, is_run), others = functions.places(FIRST, INPUTS, FIRST, KEY)
        block_of = functions.block_on(functions.whole.rows(INPUTS, FIRST))
        given = trained, hidden, frozen, {}, number[0], is_run[0]
        return block_of(*given, *others)[0]

    right = plain_block(block, hidden)
    np.testing.assert_allclose(run(trained, frozen), right, rtol=1e-5, atol=1e-6)
