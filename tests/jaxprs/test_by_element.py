"""Is what goes by elements found, and the same on pieces as on the whole?"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.jaxprs.by_element import LeafGroup, SplitJaxpr, split_by_element
from jaxpar.jaxprs.evaluate import inlined

SHAPES = {"a": (8, 3), "b": (4,)}


def arrays(seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    draw = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    return {name: jnp.asarray(x, jnp.float32) for name, x in draw.items()}


def split_of(optimizer: optax.GradientTransformation) -> tuple[SplitJaxpr, list, list]:
    """An optimizer's update, split by parameter; its arguments and right results."""
    params, grads = arrays(0), arrays(1)
    state = optimizer.init(params)
    _, state = optimizer.update(arrays(2), state, params)
    flat, structure = jax.tree.flatten((grads, params, state))

    def step(*args: jax.Array) -> list[jax.Array]:
        grads, params, state = jax.tree.unflatten(structure, args)
        updates, state = optimizer.update(grads, state, params)
        return jax.tree.leaves((optax.apply_updates(params, updates), state))

    like = [x.shape for x in jax.tree.leaves(state)]
    groups = []
    for number, (name, shape) in enumerate(SHAPES.items()):
        own = [place for place, found in enumerate(like) if found == shape]
        ins = 2 + number, *(4 + place for place in own)
        outs = number, *(2 + place for place in own)
        groups.append(LeafGroup(name, ins, outs, beside=(number,)))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat]
    return split_by_element(inlined(step, *shapes), groups), flat, step(*flat)


def by_rows(split: SplitJaxpr, args: list[jax.Array]) -> list[jax.Array]:
    """The results, of the parts a row at a time."""
    own = {number for part in split.parts for number in part.group.ins}
    outs, scalars = split.rest({n: x for n, x in enumerate(args) if n not in own})
    for part, numbers in zip(split.parts, scalars, strict=True):
        given = [args[n] for n in (*part.group.ins, *part.group.beside)]
        rows = [
            part([x[i : i + 1] for x in given], numbers) for i in range(len(given[0]))
        ]
        whole = [jnp.concatenate(pieces) for pieces in zip(*rows, strict=True)]
        outs.update(zip(part.group.outs, whole, strict=True))
    return [outs[number] for number in range(len(outs))]


def assert_close(found: list[jax.Array], right: list[jax.Array]) -> None:
    for one, other in zip(found, right, strict=True):
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def kernels_alone(params: dict) -> dict:
    return jax.tree.map(lambda x: x.ndim > 1, params)


BY_ELEMENT = {
    "sgd": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(optax.linear_schedule(0.1, 0.0, 10), mask=kernels_alone),
    "lion": optax.lion(0.1),
    "adabelief": optax.adabelief(0.1),
    "clip by the norm of all": optax.chain(
        optax.clip_by_global_norm(0.1), optax.adam(0.1)
    ),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "two kinds": optax.partition(
        {"a": optax.adam(0.1), "b": optax.sgd(0.2)}, {"a": "a", "b": "b"}
    ),
}


@pytest.mark.parametrize("name", BY_ELEMENT)
def test_pieces_are_those_of_the_whole(name: str) -> None:
    split, args, right = split_of(BY_ELEMENT[name])
    assert [part.group.name for part in split.parts] == ["a", "b"]
    assert_close(by_rows(split, args), right)


@pytest.mark.parametrize(
    ("optimizer", "whole"),
    [
        (optax.lamb(0.1), ["a", "b"]),
        (optax.adafactor(0.1, min_dim_size_to_factor=3), ["a", "b"]),
        (optax.contrib.muon(0.1), ["a"]),
        (optax.adaptive_grad_clip(0.01), ["a", "b"]),
        (optax.noisy_sgd(0.1, key=0), ["a", "b"]),
    ],
    ids=["lamb", "adafactor", "muon", "adaptive clipping", "noise"],
)
def test_what_needs_the_whole_leaf_is_said(optimizer, whole) -> None:
    split, args, right = split_of(optimizer)
    assert list(split.whole) == whole
    assert all(split.whole.values())
    assert_close(by_rows(split, args), right)


def test_a_leaf_that_another_output_needs_is_whole() -> None:
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    groups = [LeafGroup("x", (0,), (0,)), LeafGroup("y", (1,), (1,))]

    def step(x, y):
        return x + 1, y * 2, x.sum()

    split = split_by_element(inlined(step, shape, shape), groups)
    assert split.whole == {"x": "result 2 of another leaf depends on it"}
    assert [part.group.name for part in split.parts] == ["y"]


def test_a_constant_array_beside_a_leaf_keeps_it_whole() -> None:
    """A piece of it would be needed too."""
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    weights = jnp.arange(4.0)
    split = split_by_element(
        inlined(lambda x: x * weights, shape), [LeafGroup("x", (0,), (0,))]
    )
    assert split.whole == {"x": "an array of float32[4] beside it"}


def test_what_the_rest_reads_is_known() -> None:
    own, _, _ = split_of(optax.adam(1e-2))
    assert own.reads.isdisjoint({0, 1})
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    clipped, _, _ = split_of(chain)
    assert clipped.reads >= {0, 1}
