"""Does a loop see every layer once, in order, whether it gathers ahead or not?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.jaxprs.layers import Layers, iterate

LENGTH = 4
SHARDS = jnp.arange(LENGTH, dtype=jnp.float32)
CASES = [
    (ahead, reverse, backward)
    for ahead in (False, True)
    for reverse in (False, True)
    for backward in (False, True)
]


def step(carry, layer, x):
    """Digits in the order in which they come; layers are ten times the shards."""
    return carry * 10 + layer[0] / 10, (layer[0] + x, carry)


@pytest.mark.parametrize(("ahead", "reverse", "backward"), CASES)
def test_layers_come_in_order_with_their_slices(ahead, reverse, backward):
    layers = Layers(
        gather=lambda shards: [10 * shards[0]],
        length=LENGTH,
        reverse=reverse,
        ahead=ahead,
    )
    carry, (sums, before), last = jax.jit(
        lambda: iterate(layers, [SHARDS], step, 0.0, SHARDS, backward=backward)
    )()
    order = [0, 1, 2, 3] if reverse == backward else [3, 2, 1, 0]
    assert carry == int("".join(map(str, order)))
    np.testing.assert_array_equal(sums, 11 * SHARDS)
    assert before[order[0]] == 0, "ys stand at their layers"
    assert before[order[1]] == order[0]
    assert last is None


def test_the_last_layer_can_be_gathered_again_and_begin_the_way_back():
    layers = Layers(gather=lambda s: [10 * s[0]], length=LENGTH, ahead=True)
    _, _, last = iterate(layers, [SHARDS], step, 0.0, SHARDS, again=True)
    assert last is not None
    assert last[0] == 30
    given = [jnp.float32(70.0)]  # Not what it would gather.
    back, _, _ = iterate(
        layers, [SHARDS], step, 0.0, SHARDS, backward=True, layer=given
    )
    assert back == 7210


def test_one_layer_is_gathered_at_once():
    layers = Layers(gather=lambda s: [10 * s[0]], length=1, ahead=True)
    carry, _, last = iterate(layers, [SHARDS[:1] + 5], step, 0.0, SHARDS[:1])
    assert carry == 5
    assert last is None
