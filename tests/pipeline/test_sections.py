"""Is a chunk of any section run as by hand, with the part before it, and backwards?

On two stages, four virtual ones: the wide section's and the narrow one's, whose last
has an idle place. What is not of a chunk is NaN: it must not be used.
"""

import functools
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar import tree
from jaxpar.pipeline.chunks import ChunkWork
from jaxpar.pipeline.sections import Sections
from jaxpar.pipeline.stages import divide
from tests.model import two_sections
from tests.model.toys import LENGTH, ROWS, WIDTH
from tests.model.two_sections import COUNTS, NARROW, PARTS, linear, plain_blocks
from tests.pipeline.parts import (
    ACCUMULATE,
    FIRST,
    INPUTS,
    KEY,
    cut,
    functions_of,
    make_params,
    make_sections,
)

# By virtual stage: the section, the blocks in its places, and how many are run.
CHUNKS = [
    ("wide", [0, 1], 2),
    ("wide", [2, 3], 2),
    ("narrow", [0, 1], 2),
    ("narrow", [2, 2], 1),
]
ENTRY = 2  # The virtual stage that runs the part between.
PARAMS = two_sections.make_params()
ROWS_ONCE = ROWS // ACCUMULATE, LENGTH
SHAPES = {"wide": (*ROWS_ONCE, WIDTH), "narrow": (*ROWS_ONCE, NARROW)}


def of_two(
    *, keeps: bool = False, splits: bool = False, frozen: Collection[str] = ()
) -> Sections:
    functions = functions_of(two_sections.make_network(), frozen=frozen)
    made = Sections(functions, divide(COUNTS, 2, 1), keeps=keeps, splits=splits)
    return made.of_step((PARAMS, {}), INPUTS, KEY)


def unused(values: Any) -> Any:
    return jax.tree.map(lambda x: np.full_like(x, np.nan), values)


def params_of(virtual: int) -> Any:
    """A chunk's parameters, those of the other section and part as unused."""
    name, order, _ = CHUNKS[virtual]
    orders = {part: order if part == name else [0, 1] for part in COUNTS}
    own = {
        part: jax.tree.map(lambda x, at=at: x[at], PARAMS[part])
        for part, at in orders.items()
    }
    own["narrowing"] = PARAMS["narrowing"]
    used = {name, "narrowing"} if virtual == ENTRY else {name}
    return {part: x if part in used else unused(x) for part, x in own.items()}


def value_of(kind: str, seed: int) -> tuple:
    """A stage's value that has this kind of hidden state alone."""
    rng = np.random.default_rng(seed)
    values = {name: rng.standard_normal(x, np.float32) for name, x in SHAPES.items()}
    return tuple(x if name == kind else unused(x) for name, x in values.items())


def kinds_of(virtual: int) -> tuple[str, str]:
    """Of a chunk's input and output."""
    name = CHUNKS[virtual][0]
    return "wide" if virtual == ENTRY else name, name


def of_kind(kind: str, value: Any) -> Any:
    return value[list(COUNTS).index(kind)]


def plain_chunk(virtual: int, params: Any, x: Any) -> jax.Array:
    name, _, count = CHUNKS[virtual]
    if virtual == ENTRY:
        x = linear(params["narrowing"]["out"], x)
    return plain_blocks(params[name], x, count)


@functools.cache
def compiled(*, keeps: bool, splits: bool) -> Any:
    """A chunk forwards and backwards; of any virtual stage, as a schedule runs it."""
    sections = of_two(keeps=keeps, splits=splits)

    @jax.jit
    def run(params: Any, hidden: Any, cotangent: Any, virtual: jax.Array) -> tuple:
        work = ChunkWork(virtual, INPUTS, FIRST, KEY)
        out, kept, _ = sections.forward(params, hidden, work)
        # What is kept replaces the input.
        hidden = jax.tree.map(lambda x: x * jnp.nan, hidden) if keeps else hidden
        grads, back, products = sections.backward(params, hidden, kept, cotangent, work)
        if not splits:
            return out, grads, back, None
        late = sections.weights(params, back, products, work)
        return out, grads, back, late

    return run


MODES = [(False, False), (True, False), (False, True), (True, True)]
modes = pytest.mark.parametrize(("keeps", "splits"), MODES)
stages = pytest.mark.parametrize("virtual", range(len(CHUNKS)))


def ran(virtual: int, *, keeps: bool, splits: bool) -> tuple:
    """Its results, and the plain chunk's: output, gradients, cotangent of the input."""
    first, last = kinds_of(virtual)
    params, hidden = params_of(virtual), value_of(first, 0)
    cotangent = value_of(last, 1)
    found = compiled(keeps=keeps, splits=splits)(
        params, hidden, cotangent, jnp.int32(virtual)
    )
    plain = functools.partial(plain_chunk, virtual)
    out, pull = jax.vjp(plain, params, of_kind(first, hidden))
    return found, (out, *pull(of_kind(last, cotangent)))


@stages
@pytest.mark.parametrize("keeps", [False, True])
def test_forward_of_a_chunk_is_its_blocks_after_the_part_before_them(virtual, keeps):
    (out, *_), (right, *_) = ran(virtual, keeps=keeps, splits=False)
    out = of_kind(kinds_of(virtual)[1], out)
    np.testing.assert_allclose(out, right, rtol=1e-5, atol=1e-6)


@stages
@modes
def test_backward_of_a_chunk_gives_the_plain_gradients(virtual, keeps, splits):
    """And zeros for the other section; what it defers, `weights` computes."""
    (_, grads, back, late), (_, right, right_back) = ran(
        virtual, keeps=keeps, splits=splits
    )
    if splits:
        assert not np.any(grads[CHUNKS[virtual][0]]["inner"]["kernel"]), "is deferred"
        grads = jax.tree.map(jnp.add, grads, late)
    back = of_kind(kinds_of(virtual)[0], back)
    np.testing.assert_allclose(back, right_back, rtol=1e-5, atol=1e-6)
    assert jax.tree.structure(grads) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@stages
@modes
def test_part_between_gets_its_gradient_on_its_sections_first_stage(
    virtual, keeps, splits
):
    (_, grads, *_), _ = ran(virtual, keeps=keeps, splits=splits)
    found = [np.any(leaf) for leaf in jax.tree.leaves(grads["narrowing"])]
    assert found == [virtual == ENTRY] * 2


OTHERS = [(0, mode) for mode in MODES] + [(ENTRY, mode) for mode in MODES[:-1]]


@pytest.mark.parametrize(
    ("virtual", "mode"),
    [
        (ENTRY, MODES[-1]),
        *(pytest.param(*other, marks=pytest.mark.thorough) for other in OTHERS),
    ],
)
def test_gradients_are_of_trained_leaves_alone(virtual, mode):
    """Of any section: the part between has none, of the wide blocks a bias alone."""
    frozen = {"wide/inner/kernel", "narrowing/out/kernel", "narrowing/out/bias"}
    (first, last), params = kinds_of(virtual), params_of(virtual)
    keeps, splits = mode
    own = of_two(keeps=keeps, splits=splits, frozen=frozen)
    assert own.trained(params).keys() == params.keys()

    @jax.jit
    def run(params: Any, hidden: Any, cotangent: Any) -> tuple:
        work = ChunkWork(jnp.int32(virtual), INPUTS, FIRST, KEY)
        _, kept, _ = own.forward(params, hidden, work)
        grads, back, products = own.backward(params, hidden, kept, cotangent, work)
        if splits:
            late = own.weights(params, back, products, work)
            grads = jax.tree.map(jnp.add, grads, late)
        return grads, back

    grads, back = run(params, value_of(first, 0), value_of(last, 1))
    _, (_, right, right_back) = ran(virtual, keeps=keeps, splits=splits)
    back = of_kind(first, back)
    np.testing.assert_allclose(back, right_back, rtol=1e-5, atol=1e-6)
    for name in frozen:
        right = tree.without_leaf(right, name.split("/"))
    right |= {"narrowing": {}}
    assert jax.tree.structure(grads) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_hidden_states_of_two_kinds_are_a_tuple_of_which_one_is_used():
    sections = of_two()
    shapes = [(x.shape, x.dtype) for x in sections.structs]
    assert shapes == [(shape, jnp.float32) for shape in SHAPES.values()]
    wide, narrow = (jnp.ones(shape) for shape in SHAPES.values())
    assert sections.first((wide, narrow)) is wide
    assert sections.last((wide, narrow)) is narrow
    wrapped = sections.of_first(wide), sections.of_last(narrow)
    assert wrapped[0][0] is wide
    assert wrapped[1][1] is narrow
    for value in wrapped:
        assert [x.shape for x in value] == list(SHAPES.values())


def of_wide_ends(parts: Any, counts: Any) -> Sections:
    """Of other sections, after which hidden states are wide again."""
    network = two_sections.make_network(parts, counts, head=two_sections.HEADS[WIDTH])
    params = jax.eval_shape(lambda: network.init(jax.random.key(0))[0])
    division = divide(counts, 2, 1)
    made = Sections(functions_of(network), division, keeps=False, splits=False)
    return made.of_step((params, {}), INPUTS, KEY)


@pytest.mark.parametrize("between", [{}, {"between": PARTS["wide"]}])
def test_hidden_states_of_one_kind_are_passed_as_they_are(between):
    """Whether there is a part between the sections or not."""
    parts = {"one": PARTS["wide"], **between, "two": PARTS["wide"]}
    sections = of_wide_ends(parts, {"one": 2, "two": 2})
    assert sections.structs.shape == SHAPES["wide"]
    hidden = jnp.ones(SHAPES["wide"])
    for pass_on in ("first", "last", "of_first", "of_last"):
        assert getattr(sections, pass_on)(hidden) is hidden
    assert sections.names == (("one", "two"), tuple(between))


def test_sections_of_one_shape_share_a_kind():
    """Wide, narrow, and wide again: the last output is of the first one's kind."""
    widening = functools.partial(two_sections.Projecting, NARROW, WIDTH)
    parts = {**PARTS, "widening": widening, "again": PARTS["wide"]}
    sections = of_wide_ends(parts, {**COUNTS, "again": 2})
    assert [x.shape for x in sections.structs] == list(SHAPES.values())
    wide, narrow = (jnp.ones(shape) for shape in SHAPES.values())
    assert sections.first((wide, narrow)) is sections.last((wide, narrow)) is wide
    assert sections.names == (("wide", "narrow", "again"), ("narrowing", "widening"))


def test_chunk_has_its_section_of_the_stage_and_all_of_the_parts_between():
    """Two wide chunks of one block, then a narrow one of two."""
    functions = functions_of(two_sections.make_network())
    sections = Sections(functions, divide(COUNTS, 2, 2), keeps=False, splits=False)
    params = {"wide": jnp.arange(2.0), "narrow": jnp.arange(2.0), "narrowing": 7.0}
    for chunk, (wide, narrow) in enumerate(
        [([0], [0, 1]), ([1], [0, 1]), ([1], [0, 1])]
    ):
        own = sections.chunk_of(params, jnp.int32(chunk))
        assert own["wide"].tolist() == wide
        assert own["narrow"].tolist() == narrow
        assert own["narrowing"] == 7
        ones = jax.tree.map(jnp.ones_like, own)
        added = sections.add_chunk(params, ones, jnp.int32(chunk))
        assert added["wide"].tolist() == [x + (x in wide) for x in range(2)]
        assert added["narrow"].tolist() == [1, 2]
        assert added["narrowing"] == 8
        state = {name: params[name] for name in ("wide", "narrow")}
        made = jax.tree.map(
            lambda x: -x - 1, sections.chunk_of(state, jnp.int32(chunk))
        )
        placed = sections.put_chunk(state, made, jnp.int32(chunk))
        assert placed["wide"].tolist() == [-x - 1 if x in wide else x for x in range(2)]
        assert placed["narrow"].tolist() == [-1, -2]


def test_model_of_one_section_has_no_branches():
    def text(sections: Sections, params: Any, hidden: Any) -> str:
        def run(params: Any, hidden: Any) -> tuple:
            work = ChunkWork(FIRST, INPUTS, FIRST, KEY)
            out, kept, _ = sections.forward(params, hidden, work)
            return sections.backward(params, hidden, kept, out, work)

        return str(jax.make_jaxpr(run)(params, hidden))

    params = make_params(1)
    made = make_sections(cut(2, 2)).of_step((params, {}), INPUTS, KEY)
    one = made, {"blocks": params["blocks"]}
    assert "cond" not in text(*one, jnp.ones(SHAPES["wide"]))
    assert "cond" in text(of_two(), params_of(0), value_of("wide", 0))
