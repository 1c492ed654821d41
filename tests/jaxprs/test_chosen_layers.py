"""Does a loop over chosen layers see these alone, in order, and gather no other?"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.jaxprs.chosen_layers import Chosen, iterate_chosen
from jaxpar.jaxprs.layer_loop import LayerLoop
from jaxpar.jaxprs.layers import Layers

LENGTH, WIDTH = 5, 3
SHARDS = jnp.arange(1.0, LENGTH + 1)
CHOICES = [(), (0,), (4,), (1, 3), (0, 1, 2, 3, 4)]
WAYS = list(itertools.product((False, True), repeat=3))


def flags(chosen: tuple[int, ...]) -> jax.Array:
    return jnp.isin(jnp.arange(LENGTH), jnp.array(chosen))


@pytest.mark.parametrize(("ahead", "reverse", "backward"), WAYS)
def test_chosen_layers_come_in_order_with_their_slices(ahead, reverse, backward):
    gathered = []

    def gather(shards):
        jax.debug.callback(lambda x: gathered.append(float(x)), shards[0])
        return [10 * shards[0]]

    def step(carry, layer, x):
        return carry * 10 + layer[0] / 10, (layer[0] + x, carry)

    layers = Layers(gather=gather, length=LENGTH, reverse=reverse, ahead=ahead)

    @jax.jit
    def run(flags):
        how = {"starts": {0: -SHARDS}, "backward": backward}
        given = layers, Chosen.of(flags, 0.5), [SHARDS], step, 0.0, SHARDS
        return iterate_chosen(*given, **how)

    for chosen in CHOICES:
        gathered.clear()
        carry, (sums, before), last = run(flags(chosen))
        jax.effects_barrier()
        order = [int(SHARDS[n]) for n in chosen][:: 1 if reverse == backward else -1]
        assert carry == int("0" + "".join(map(str, order)))
        np.testing.assert_array_equal(
            sums, jnp.where(flags(chosen), 11 * SHARDS, -SHARDS)
        )
        assert not before[~flags(chosen)].any(), "zeros where nothing is said"
        assert last is None
        assert sorted(gathered) == sorted(order) or (ahead and not chosen)


def test_the_last_chosen_layer_begins_the_way_back():
    layers = Layers(gather=lambda s: [10 * s[0]], length=LENGTH, ahead=True)

    def step(carry, layer, x):
        return carry * 10 + layer[0] / 10, ()

    given = layers, Chosen.of(flags((1, 3)), 0.4), [SHARDS], step, 0.0, SHARDS
    how = {"starts": {}}
    _, _, last = iterate_chosen(*given, **how, again=True)
    assert last is not None
    assert last[0] == 40
    own = [jnp.float32(70.0)]  # Not what it would gather.
    back, _, _ = iterate_chosen(*given, **how, backward=True, layer=own)
    assert back == 72


def loop(ahead: bool, keep: bool) -> LayerLoop:
    def body(consts, carry, layer, xs):
        (scale,), (h,), (w,), (state, b) = consts, carry, layer, xs
        h = h + jnp.tanh(h @ w * scale + b)
        return [h], [state * scale + h.sum(), h.mean()]

    return LayerLoop(
        body=body,
        gather=lambda shards: [2.0 * x for x in shards],
        reduce=lambda grads, _: [2.0 * g for g in grads],
        length=LENGTH,
        ahead=ahead,
        keep=keep,
        passed={0: 0},
    )


def values() -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(1)
    shapes = (), (2, WIDTH), (LENGTH, WIDTH, WIDTH), (LENGTH,), (LENGTH, WIDTH)
    return tuple(jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)


def by_conditional(flags, scale, h, w, state, b):
    """The definition: a scan whose body is a conditional."""

    def body(h, own):
        flag, w, state, b = own

        def run():
            after = h + jnp.tanh(h @ (2 * w) * scale + b)
            return after, (state * scale + after.sum(), after.mean())

        return jax.lax.cond(flag, run, lambda: (h, (state, 0.0)))

    h, (state, means) = jax.lax.scan(body, h, (flags, w, state, b))
    return (h**2).sum() + (state * jnp.arange(1.0, 6.0)).sum() + (means**2).sum()


@pytest.mark.parametrize(("ahead", "keep"), list(itertools.product((0, 1), repeat=2)))
def test_values_and_gradients_are_those_of_a_conditional(ahead, keep):
    @jax.jit
    def found(flags, *args):
        def run(scale, h, w, state, b):
            shards = [jax.lax.stop_gradient(w)]
            own = loop(bool(ahead), bool(keep))
            given = [scale], [h], [w], shards, [state, b], Chosen.of(flags, 0.5)
            (h,), (state, means) = own(*given)
            weighted = (state * jnp.arange(1.0, 6.0)).sum()
            return (h**2).sum() + weighted + (means**2).sum()

        return jax.value_and_grad(run, range(5))(*args)

    right = jax.jit(jax.value_and_grad(by_conditional, range(1, 6)))
    for chosen in CHOICES:
        given = flags(chosen), *values()
        for one, other in zip(
            jax.tree.leaves(found(*given)), jax.tree.leaves(right(*given)), strict=True
        ):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-5)
