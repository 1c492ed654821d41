"""Are sections named, ordered, initialised and run one after the other, as by hand?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpar
from jaxpar.tree import named_leaves
from tests.model.toys import BATCHES, WIDTH, loss_fn
from tests.model.two_sections import (
    COUNTS,
    HEADS,
    NARROW,
    PARTS,
    Adding,
    Projecting,
    make_model,
    make_network,
    make_params,
    plain_loss,
)

KEY = jax.random.key(3)
WIDE, BETWEEN = (PARTS["wide"], 2), PARTS["narrowing"]
PAIR = (PARTS["narrow"], 3)


def init(network) -> dict:
    return jax.jit(network.init)(KEY)[0]


def named(sections) -> list[str]:
    """Names of parameters' parts, in the network's order."""
    network = make_model(sections=sections).make_network(loss_fn, BATCHES[0])
    return list(dict.fromkeys(name.split("/")[0] for name in network.dim_names()))


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        ([WIDE, BETWEEN, PAIR], ["blocks_0", "between_1", "blocks_2"]),
        (
            (WIDE, BETWEEN, PAIR, PAIR),
            ["blocks_0", "between_1", "blocks_2", "blocks_3"],
        ),
        ({"a": WIDE, "to": BETWEEN, "b": PAIR}, ["a", "to", "b"]),
    ],
)
def test_sections_have_the_names_of_the_mapping_or_of_their_place(sections, names):
    assert named(sections) == ["embed", *names, "head"]


@pytest.mark.parametrize(
    ("sections", "name"), [([WIDE], "blocks"), ({"layers": WIDE}, "layers")]
)
def test_single_section_is_named_blocks_unless_a_mapping_names_it(sections, name):
    model = make_model(sections=sections, head=HEADS[WIDTH])
    network = model.make_network(loss_fn, BATCHES[0])
    params, _ = jax.eval_shape(network.init, KEY)
    assert sorted(params) == sorted(["embed", name, "head"])


ORDER = (
    r"a part that is not a pair \(block, count\) must stand between two pairs\. Move "
    r"what comes first to embed, what comes last to head, and join two parts in one\."
)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ([BETWEEN, PAIR], rf"sections are between_0, blocks_1: {ORDER}"),
        ([WIDE, BETWEEN], rf"sections are blocks_0, between_1: {ORDER}"),
        (
            {"a": WIDE, "b": BETWEEN, "c": BETWEEN, "d": PAIR},
            rf"sections are a, b, c, d: {ORDER}",
        ),
        ([], r"sections has no pair \(block, count\), such as sections=\["),
        ({}, r"sections has no pair \(block, count\)"),
        ([BETWEEN], r"sections has no pair \(block, count\)"),
        (PAIR, r"sections has no pair \(block, count\)"),
        (
            {"embed": WIDE, "to": BETWEEN, "b": PAIR},
            r"a section can't be named 'embed', as the model's embed is; name it other",
        ),
        ({"a": WIDE, "head": BETWEEN, "b": PAIR}, r"a section can't be named 'head'"),
        (
            {"a": WIDE, "to": BETWEEN, "b": (PARTS["narrow"], 0)},
            r"section 'b' has count 0; it must be at least 1\.",
        ),
        (
            [WIDE, BETWEEN, ([PARTS["narrow"]] * 2, 3)],
            r"section 'blocks_2' has 2 blocks, but count 3; give one block for all, or",
        ),
    ],
)
def test_sections_in_an_order_that_can_not_be_run_are_refused(sections, message):
    with pytest.raises(ValueError, match="^PipelineModel: " + message):
        make_model(sections=sections)


@pytest.mark.parametrize("unroll", [0, 5])
def test_unroll_is_up_to_the_largest_count(unroll):
    message = rf"PipelineModel: unroll={unroll} must be between 1 and 4, the largest co"
    with pytest.raises(ValueError, match=message):
        make_model(unroll=unroll)


@pytest.mark.parametrize(
    "change", [{}, {"unroll": 2}, {"unroll": 4, "remat": "none"}, {"remat": "dots"}]
)
def test_sections_and_their_gradients_are_the_plain_models(change):
    network, params = make_network(**change), make_params()

    def loss(params):
        return network.run(loss_fn, (params, {}), KEY, BATCHES[0], training=True)[0]

    found, grads = jax.jit(jax.value_and_grad(loss))(params)
    plain = jax.jit(jax.value_and_grad(plain_loss))
    right, right_grads = plain(params, BATCHES[0])
    assert float(found) == pytest.approx(float(right), rel=1e-5)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, grads, right_grads)


@pytest.mark.parametrize(("unroll", "loops"), [(1, 2), (3, 1), (4, 0)])
def test_largest_count_removes_the_loops(unroll, loops):
    """Of four and three blocks; the shorter section's loop ends at its own count."""
    network = make_network(unroll=unroll, remat="none")

    def logits(params):
        def call(model, batch):
            return model(batch["tokens"])

        return network.run(call, (params, {}), KEY, BATCHES[0], training=True)[0]

    text = jax.jit(logits).lower(make_params()).as_text()
    assert text.count("stablehlo.while") == loops


def test_leaves_of_a_section_are_stacked_and_those_between_are_not():
    network = make_network()
    params, _ = jax.eval_shape(network.init, KEY)
    leaves, names = named_leaves(params), network.dim_names()
    assert leaves.keys() == names.keys()
    assert network.num_blocks == sum(COUNTS.values())
    for part, count in COUNTS.items():
        assert leaves[f"{part}/inner/bias"].shape[0] == count
        assert names[f"{part}/inner/bias"] == ("layers",)
    assert leaves["narrowing/out/kernel"].shape == (WIDTH, NARROW)
    assert names["narrowing/out/kernel"] is None


class Noisy(Adding):
    """A block that also draws numbers when it is called."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(WIDTH, rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(super().__call__(x))


def test_blocks_draw_the_same_in_one_section_and_in_two():
    """By their number in the model, in initialisation and in a call."""

    def call(model, batch):
        return model(batch["tokens"])

    results = []
    for sections in ([(Noisy, 5)], [(Noisy, 2), (Noisy, 3)]):
        model = make_model(sections=sections, head=HEADS[WIDTH])
        network = model.make_network(loss_fn, BATCHES[0])
        params = init(network)
        out = network.run(call, (params, {}), KEY, BATCHES[0], training=True)[0]
        stacks = [params[section.name] for section in network.sections]
        joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *stacks)
        results.append((params["embed"], joined, params["head"], out))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_every_part_is_initialised_from_a_key_of_its_own():
    """Two parts between of one shape, and the head of that shape too."""
    square = functools.partial(Projecting, WIDTH, WIDTH)
    wide = (PARTS["wide"], 2)
    sections = {"a": wide, "to": square, "b": wide, "from": square, "c": wide}
    model = make_model(sections=sections, head=square)
    params = init(model.make_network(lambda m, b: m(b["tokens"]), BATCHES[0]))
    kernels = [params[part]["out"]["kernel"] for part in ("to", "from", "head")]
    kernels += [kernel for part in "abc" for kernel in params[part]["inner"]["kernel"]]
    assert len({np.asarray(kernel).tobytes() for kernel in kernels}) == 3 + 6


class Ones(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.one = nnx.Param(jnp.ones(()))

    def __call__(self, tokens):
        return jnp.full((*tokens.shape, 512), self.one[...])


class AsItIs(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.one = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return x * self.one[...]


class Halving(AsItIs):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(super().__call__(x))


def test_parts_between_draw_masks_of_their_own_in_every_call():
    """Two of them leave a quarter, where one mask would leave a half."""

    def twice(model, batch):
        return model(batch["tokens"]), model(batch["tokens"])

    one = (AsItIs, 1)
    model = jaxpar.PipelineModel(
        embed=Ones, sections=[one, Halving, one, Halving, one], head=AsItIs
    )
    network = model.make_network(twice, BATCHES[0])
    run = functools.partial(network.run, twice, (init(network), {}), KEY, BATCHES[0])
    (first, second), _ = run(training=True)
    assert np.mean(first != 0) == pytest.approx(1 / 4, abs=0.02)
    assert not np.array_equal(first, second)
    assert np.all(run(training=False)[0][0] == 1)


@pytest.mark.parametrize("name", ["a/b", ""])
def test_name_that_is_not_a_key_of_the_parameters_is_refused(name):
    with pytest.raises(ValueError, match=rf"a section is named {name!r}; the name is"):
        make_model(sections={name: PAIR})
