"""Do the checks of parts say which section is wrong, and let pass what fits?

Of a model of one section they are in test_bad_blocks.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.model.part_checks import (
    check_block_output,
    check_equal_blocks,
    check_equal_programs,
    check_keywords,
    check_ties,
)
from jaxpar.model.proxies import Call
from tests.model.toys import BATCHES, WIDTH, cross_entropy, loss_fn
from tests.model.two_sections import (
    HEADS,
    NARROW,
    PARTS,
    Adding,
    Projecting,
    linear,
    make_model,
    make_network,
    make_params,
    plain_blocks,
)

TOKENS = BATCHES[0]["tokens"]
KEY = jax.random.key(0)


class Deep(Adding):
    """A narrow block of a parameter more."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(NARROW, rngs)
        self.scale = nnx.Param(jnp.ones(3))


class Doubling(Adding):
    """A narrow block of the others' parameters, which computes something else."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(NARROW, rngs)

    def __call__(self, x):
        return 2 * super().__call__(x)


class Counted(Adding):
    """A narrow block of the others' parameters, and state besides."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(NARROW, rngs)
        self.calls = nnx.Variable(jnp.zeros(()))


class Shifted(Adding):
    """A block that takes a keyword."""

    def __call__(self, x, *, shift=None):
        return super().__call__(x if shift is None else x + shift)


class Gaining(Projecting):
    """A part between that takes keywords, one of them a flag of Python's."""

    def __call__(self, x, *, gain=1.0, negate=False):
        out = gain * super().__call__(x)
        return -out if negate else out


narrow = PARTS["narrow"]
WRONG = {
    "block of another width": (
        {"narrow": functools.partial(Projecting, NARROW, 5)},
        r"narrow: a block is given \[\(\(8, 5, 6\), 'float32'\)\] \(shape, dtype\) and "
        r"returns \[\(\(8, 5, 5\), 'float32'\)\]; a block's output is",
    ),
    "block of a parameter more": (
        {"narrow": [narrow, Deep, narrow]},
        r"narrow: block 1 has scale of shape \(3,\), block 0 of None; blocks are",
    ),
    "block that computes something else": (
        {"narrow": [narrow, narrow, Doubling]},
        r"narrow: block 2 computes something else than block 0 with parameters of",
    ),
    "state in a later block": (
        {"narrow": [narrow, Counted, narrow]},
        r"narrow: block 1 has calls of shape \(\), block 0 of None; blocks are stacked",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_section_that_is_wrong_is_named(case):
    change, message = WRONG[case]
    with pytest.raises(ValueError, match="^PipelineModel: " + message):
        make_network({**PARTS, **change})


def test_sections_without_names_are_named_by_their_place():
    sections = [(PARTS["wide"], 2), PARTS["narrowing"], (narrow, 2)]
    bad = {
        "blocks_0: a block is given": [(HEADS[WIDTH], 2), *sections[1:]],
        "blocks_2: block 1 has": [*sections[:2], ([narrow, Deep], 2)],
    }
    for message, given in bad.items():
        model = make_model(sections=given)
        with pytest.raises(ValueError, match=f"^PipelineModel: {message}"):
            model.make_network(loss_fn, BATCHES[0])


def calling(**kwargs: Any) -> Any:
    def loss(model, batch):
        return cross_entropy(model(batch["tokens"], **kwargs), batch["targets"])

    return loss


def logits_with(parts: dict, **kwargs: Any) -> jax.Array:
    """What a model of other parts returns for these keywords, and these parameters."""
    network = make_model({**PARTS, **parts}).make_network(calling(**kwargs), BATCHES[0])

    def call(model, batch):
        return model(batch["tokens"], **kwargs)

    @jax.jit
    def run(params):
        return network.run(call, (params, {}), KEY, BATCHES[0], training=False)[0]

    return run(make_params())


def test_keyword_that_only_a_later_section_takes_reaches_its_blocks():
    got = logits_with({"narrow": functools.partial(Shifted, NARROW)}, shift=0.5)
    params = make_params()
    x = plain_blocks(params["wide"], params["embed"]["table"][TOKENS], 4)
    x = linear(params["narrowing"]["out"], x)
    for layer in range(3):
        own = jax.tree.map(lambda leaf, i=layer: leaf[i : i + 1], params["narrow"])
        x = plain_blocks(own, x + 0.5, 1)
    right = linear(params["head"]["out"], x)
    np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("negate", [True, False])
def test_part_between_sections_takes_keywords(negate):
    parts = {"narrowing": functools.partial(Gaining, WIDTH, NARROW)}
    got = logits_with(parts, gain=jnp.float32(3), negate=negate)
    params = make_params()
    x = plain_blocks(params["wide"], params["embed"]["table"][TOKENS], 4)
    x = linear(params["narrowing"]["out"], x) * (-3 if negate else 3)
    right = linear(params["head"]["out"], plain_blocks(params["narrow"], x, 3))
    np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5)


def test_keyword_that_no_part_takes_is_said_with_what_each_takes():
    parts = {
        "narrowing": functools.partial(Gaining, WIDTH, NARROW),
        "narrow": functools.partial(Shifted, NARROW),
    }
    model = make_model({**PARTS, **parts})
    with pytest.raises(ValueError, match=r"calls the model with shfit=, which") as info:
        model.make_network(calling(shfit=1.0, gain=2.0), BATCHES[0])
    told = str(info.value)
    for part in (
        "embed takes positions",
        "wide takes none",
        "narrowing takes gain, negate",
        "narrow takes shift",
        "head takes none",
        "Did you mean 'shift'?",
    ):
        assert part in told


def test_parts_that_fit_pass_every_check():
    """Called as `PipelineModel` does; a tree of hidden values may be in any form."""
    network, call = make_network(), Call((jnp.ones((2, WIDTH)),), {})
    wide, _ = network.sections
    check_equal_blocks("wide", wide.blocks * 2)
    check_equal_programs("wide", wide.blocks * 2, call)
    check_keywords(call, network.embed, network.sections, network.head, wide.hidden)
    check_ties(network.embed, network.head, {})
    shape = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    check_block_output(
        "wide", {"x": shape, "memory": shape}, {"memory": shape, "x": shape}
    )


@pytest.mark.parametrize(
    "returned",
    [
        jax.ShapeDtypeStruct((2, 3), jnp.float32),
        {"x": jax.ShapeDtypeStruct((2, 3), jnp.float32)},
        (
            jax.ShapeDtypeStruct((2, 3), jnp.bfloat16),
            jax.ShapeDtypeStruct((2, 4), jnp.float32),
        ),
        (
            jax.ShapeDtypeStruct((2, 4), jnp.float32),
            jax.ShapeDtypeStruct((2, 3), jnp.float32),
        ),
    ],
)
def test_block_whose_output_is_of_another_tree_is_refused(returned):
    given = tuple(jax.ShapeDtypeStruct((2, n), jnp.float32) for n in (3, 4))
    check_block_output("decoder", given, given)
    with pytest.raises(ValueError, match=r"PipelineModel: decoder: a block is given"):
        check_block_output("decoder", given, returned)
