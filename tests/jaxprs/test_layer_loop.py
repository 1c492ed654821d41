"""Does a loop that gathers its layers equal a plain scan, and save what it must?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.jaxprs.layer_loop import LayerLoop

LAYERS, WIDTH = 5, 8
MODES = [(False, False), (True, False), (False, True), (True, True)]


def first(grads, _):
    """A reduction that does nothing; it has no use of the layer's number."""
    return list(grads)


def block(table, scale, key, h, w, frozen, b, number):
    """Uses a const, a key, an integer, and a table that depends on the const alone."""
    noise = jax.random.uniform(jax.random.fold_in(key, number), h.shape)
    h = jnp.tanh(h @ w + h @ frozen + b * scale) * (1 + 0.1 * noise)
    return h + jnp.sin(table)[: h.shape[0]], h.sum()


def make_loop(ahead, keep, *, reverse=False, unroll=1):
    def body(consts, carry, layer, xs):
        (table, scale, key), (h, count), (w, frozen), (b, number) = (
            consts,
            carry,
            layer,
            xs,
        )
        h, total = block(table, scale, key, h, w, frozen, b, number)
        return [h, count + 1], [total, number * 2]

    return LayerLoop(
        body=body,
        gather=lambda shards: [2.0 * x for x in shards],
        reduce=lambda grads, _: [2.0 * g for g in grads],
        length=LAYERS,
        reverse=reverse,
        unroll=unroll,
        ahead=ahead,
        keep=keep,
    )


def arguments():
    rng = np.random.default_rng(0)
    w, frozen, b = (
        jnp.asarray(rng.normal(0, 0.3, (LAYERS, *shape)), jnp.float32)
        for shape in ((WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH,))
    )
    table, h = jnp.asarray(rng.normal(size=(2, 3, WIDTH)), jnp.float32)
    return table, jnp.float32(0.7), h, w, frozen, b


def by_loop(ahead, keep, **how):
    def run(table, scale, h, w, frozen, b):
        numbers = jnp.arange(LAYERS)
        loop = make_loop(ahead, keep, **how)
        consts, init = [table, scale, jax.random.key(3)], [h, 0]
        shards = [jax.lax.stop_gradient(w), frozen]
        (h, count), (sums, doubled) = loop(
            consts, init, [w, None], shards, [b, numbers]
        )
        return (h**2).sum() + (sums * doubled).sum() + count

    return run


def plainly(table, scale, h, w, frozen, b, *, reverse=False):
    frozen = jax.lax.stop_gradient(frozen)

    def body(carry, layer):
        (h, count), (w, frozen, b, number) = carry, layer
        key = jax.random.key(3)
        h, total = block(table, scale, key, h, 2 * w, 2 * frozen, b, number)
        return (h, count + 1), (total, number * 2)

    layers = (w, frozen, b, jnp.arange(LAYERS))
    (h, count), (sums, doubled) = jax.lax.scan(body, (h, 0), layers, reverse=reverse)
    return (h**2).sum() + (sums * doubled).sum() + count


TRAINED = (0, 1, 2, 3, 5)


@functools.cache
def plain_values(reverse):
    run = functools.partial(plainly, reverse=reverse)
    return jax.jit(jax.value_and_grad(run, TRAINED))(*arguments())


@pytest.mark.parametrize("reverse", [False, True], ids=["", "reverse"])
@pytest.mark.parametrize(("ahead", "keep"), MODES)
def test_values_and_gradients_equal_a_plain_scans(ahead, keep, reverse):
    run = by_loop(ahead, keep, reverse=reverse, unroll=2 if keep else 1)
    found = jax.jit(jax.value_and_grad(run, TRAINED))(*arguments())
    right = plain_values(reverse)
    assert float(found[0]) == pytest.approx(float(right[0]), rel=1e-6)
    for one, other in zip(found[1], right[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
    assert float(jax.jit(run)(*arguments())) == pytest.approx(float(right[0]), rel=1e-6)


@pytest.mark.parametrize(("ahead", "keep"), MODES)
def test_what_is_saved_is_no_layer_and_nothing_twice(ahead, keep):
    """Stacks of parameters are saved only by `keep`; of the table's sine, one copy."""
    saved = []

    def run(h, w):
        table, scale, _, _, frozen, b = arguments()
        out, pull = jax.vjp(
            lambda h, w: by_loop(ahead, keep)(table, scale, h, w, frozen, b), h, w
        )
        saved.extend(tuple(x.shape) for x in jax.tree.leaves(pull))
        return out

    _, _, h, w, *_ = arguments()
    jax.eval_shape(run, h, w)
    # The stacks of shards as they were given, or those of the layers.
    assert saved.count((LAYERS, WIDTH, WIDTH)) == 2
    assert (LAYERS, 3, WIDTH) in saved, "what the tanh saves"
    assert saved.count((WIDTH, WIDTH)) == (2 if ahead and not keep else 0)


def gathers(fn, *args):
    """Where a trace gathers: by enclosing loop's trip count, how often."""
    found = {}

    def look(jaxpr, times):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "psum":
                found[times] = found.get(times, 0) + 1
            inside = times * eqn.params.get("length", 1)
            for value in eqn.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    look(inner, inside)

    look(jax.make_jaxpr(fn)(*args).jaxpr, 1)
    return found


@pytest.mark.parametrize(("ahead", "keep"), MODES)
def test_each_layer_is_gathered_once_a_pass(ahead, keep):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def run(w):
        loop = LayerLoop(
            body=lambda consts, carry, layer, xs: ([jnp.tanh(carry[0] @ layer[0])], []),
            gather=lambda shards: [jax.lax.psum(shards[0], "data")],
            reduce=first,
            length=LAYERS,
            ahead=ahead,
            keep=keep,
        )
        h = jnp.ones((3, WIDTH))
        return loop([], [h], [w], [jax.lax.stop_gradient(w)], [])[0][0].sum()

    step = jax.shard_map(
        jax.grad(run),
        mesh=mesh,
        in_specs=jax.sharding.PartitionSpec(),
        out_specs=jax.sharding.PartitionSpec(),
        check_vma=False,
    )
    passes = 1 if keep else 2
    found = gathers(step, jnp.ones((LAYERS, WIDTH, WIDTH)))
    assert sum(times * number for times, number in found.items()) == passes * LAYERS


def test_a_loop_has_one_derivative():
    table, scale, h, w, frozen, b = arguments()

    def first(w):
        return jax.grad(by_loop(True, False), 3)(table, scale, h, w, frozen, b).sum()

    with pytest.raises(TypeError):
        jax.jvp(
            lambda h: by_loop(True, False)(table, scale, h, w, frozen, b), (h,), (h,)
        )
    assert np.isfinite(float(first(w)))


def test_outputs_may_be_keys():
    def body(consts, carry, layer, xs):
        key, own = jax.random.split(carry[0])
        return [key, carry[1] * layer[0].sum()], [own]

    def run(w, ahead):
        loop = LayerLoop(
            body=body, gather=list, reduce=first, length=LAYERS, ahead=ahead
        )
        init = [jax.random.key(0), jnp.float32(1)]
        (_, product), (keys,) = loop([], init, [w], [jax.lax.stop_gradient(w)], [])
        return product, jax.random.key_data(keys)

    w = jnp.linspace(0.5, 1.5, LAYERS * 2).reshape(LAYERS, 2)
    grads = {}
    for ahead in (False, True):
        (_, keys), pull = jax.vjp(lambda w, ahead=ahead: run(w, ahead), w)
        zero = np.zeros(keys.shape, jax.dtypes.float0)
        grads[ahead] = (*pull((jnp.float32(1), zero)), keys)
    np.testing.assert_allclose(grads[True][0], grads[False][0], rtol=1e-6)
    np.testing.assert_array_equal(grads[True][1], grads[False][1])
