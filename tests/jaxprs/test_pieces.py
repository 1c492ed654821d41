"""Are outputs computed piece by piece those of one program, and equal pieces shared?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxpar.jaxprs.pieces import compute_in_pieces, split

INITIALIZERS = {
    "lecun_normal": nnx.initializers.lecun_normal(),
    "glorot_uniform": nnx.initializers.glorot_uniform(),
    "normal": nnx.initializers.normal(0.02),
    "orthogonal": nnx.initializers.orthogonal(),
    "ones": nnx.initializers.ones,
}


def layers(initializer, count: int = 3):
    def make(key):
        made = [
            initializer(jax.random.fold_in(key, number), (96, 64), jnp.float32)
            for number in range(count)
        ]
        return {"params": made, "opt_state": optax.adam(1.0).init(made), "key": key}

    return make


def on_devices(fn, *args, spec):
    mesh = jax.make_mesh((8,), ("data",))

    def placed(x):
        return NamedSharding(mesh, spec if x.ndim == 2 else P())

    return jax.tree.map(placed, jax.eval_shape(fn, *args))


def assert_same_bits(given, right):
    for one, other in zip(jax.tree.leaves(given), jax.tree.leaves(right), strict=True):
        assert one.dtype == other.dtype
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("name", "impl"),
    [*((name, "threefry2x32") for name in INITIALIZERS), ("normal", "rbg")],
)
def test_numbers_are_those_of_one_program_to_the_bit(name, impl):
    make, key = layers(INITIALIZERS[name]), jax.random.key(3, impl=impl)
    places = on_devices(make, key, spec=P("data"))
    pieces = split(make, key)
    found = pieces.run(key, out_shardings=places)
    assert_same_bits(found, jax.jit(make, out_shardings=places)(key))
    assert jax.tree.map(lambda x: x.sharding, found) == places


def test_deeper_models_need_no_more_programs():
    """Of three shapes of Flax's own layers, each with moments."""

    def make(key, depth):
        rngs, sizes = nnx.Rngs(key), (64, 128, 64)
        model = nnx.List(
            [nnx.Linear(*sizes[n % 2 :][:2], rngs=rngs) for n in range(depth)]
        )
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        return params, optax.adam(1.0).init(params)

    key = jax.random.key(0)
    shallow, deep = (split(lambda key, n=n: make(key, n), key) for n in (4, 12))
    assert len(deep.pieces) > 5 * shallow.num_programs
    assert deep.num_programs == shallow.num_programs


def test_an_output_of_a_piece_is_never_whole_on_a_device():
    make, key = layers(INITIALIZERS["lecun_normal"], 1), jax.random.key(0)
    places = on_devices(make, key, spec=P("data"))
    pieces, shardings = split(make, key), jax.tree.leaves(places)
    texts = []
    for piece in pieces.pieces:
        own = [shardings[number] for number in piece.outs]
        ins = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in piece.ins]
        program = jax.jit(pieces.function(piece), out_shardings=own).lower(*ins)
        texts.append(program.compile().as_text())
    assert sum("f32[12,64]" in text for text in texts) == 3
    assert not any("[96,64]" in text for text in texts)


def test_outputs_that_share_a_large_array_are_one_piece():
    def make(key):
        one, other = (
            jax.random.normal(jax.random.fold_in(key, n), (96, 64)) for n in range(2)
        )
        return (
            one,
            one * 2.0,
            jnp.ones((96, 64)),
            other,
            other * 2.0,
            jnp.ones((96, 64)),
        )

    pieces = split(make, jax.random.key(0))
    assert [piece.outs for piece in pieces.pieces] == [(0, 1), (2,), (3, 4), (5,)]


def test_pieces_that_are_equal_to_no_other_are_one():
    def make(key):
        return key, jnp.ones((96, 64)), jnp.zeros((96, 64)), jnp.ones((96, 64))

    pieces = split(make, jax.random.key(0))
    assert [piece.outs for piece in pieces.pieces] == [(1,), (3,), (0, 2)]


@pytest.mark.parametrize("differs", ["constant", "literal", "function"])
def test_pieces_that_differ_have_their_own_numbers(differs):
    tables = [np.full((96, 64), n, np.float32) for n in range(2)]

    def make(key):
        def one(number):
            drawn = jax.random.normal(jax.random.fold_in(key, number), (96, 64))
            if differs == "constant":
                return drawn + tables[number]
            if differs == "literal":
                return drawn * (number - 0.0) * -1.0
            return jax.jit([jnp.sin, jnp.cos][number])(drawn)

        return [one(0), one(1), one(0), one(1)]

    key, here = jax.random.key(0), [SingleDeviceSharding(jax.devices()[0])] * 4
    pieces = split(make, key)
    assert pieces.num_programs == (1 if differs == "constant" else 2)
    found = pieces.run(key, out_shardings=here)
    assert_same_bits(found, jax.jit(make)(key))


def test_a_function_that_prints_is_not_split(capfd):
    def make(key):
        jax.debug.print("made")
        return jax.random.normal(key)

    assert split(make, jax.random.key(0)) is None


@pytest.mark.parametrize("value", [jnp.ones((96, 64)), jax.random.key(7)])
def test_a_constant_on_a_device_of_its_own_is_computed_with_at_once(value):
    constant = jax.device_put(value, jax.devices()[3])

    def make(key):
        drawn = layers(INITIALIZERS["normal"], 4)(key)["params"]
        if constant.ndim:
            return [each + constant for each in drawn]
        return layers(INITIALIZERS["normal"], 4)(constant)["params"]

    key = jax.random.key(0)
    places = on_devices(make, key, spec=P("data"))
    found = compute_in_pieces(make, key, out_shardings=places)
    assert jax.tree.map(lambda x: x.sharding, found) == places
    assert_same_bits(found, jax.jit(make, out_shardings=places)(key))


def test_an_argument_that_is_not_used_is_taken():
    def make(key):
        return [jnp.ones((96, 64)) for _ in range(3)]

    key = jax.random.key(0)
    places = on_devices(make, key, spec=P("data"))
    found = split(make, key).run(key, out_shardings=places)
    assert_same_bits(found, make(key))


def test_one_piece_is_finished_before_the_next_begins(monkeypatch):
    """Collectives of two programs at a time may wait for each other."""
    make, key = layers(INITIALIZERS["normal"]), jax.random.key(0)
    pieces, waited = split(make, key), []
    monkeypatch.setattr(jax, "block_until_ready", lambda x: waited.append(len(x)) or x)
    pieces.run(key, out_shardings=on_devices(make, key, spec=P("data")))
    assert waited == [len(piece.outs) for piece in pieces.pieces]


def test_every_output_is_stored_before_the_next_is_made() -> None:
    """Also where no two are equal, which are one program otherwise."""

    def fn(key: jax.Array) -> dict[str, jax.Array]:
        keys = jax.random.split(key, 3)
        return {str(n): jax.random.normal(keys[n], (100 * n + 100,)) for n in range(3)}

    order = []

    def put(name: str, array: jax.Array) -> str:
        order.append(name)
        return f"{name}: {array.size}"

    key = jax.random.key(0)
    shapes = jax.eval_shape(fn, key)
    puts = {name: functools.partial(put, name) for name in shapes}
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    places = dict.fromkeys(shapes, place)
    found = compute_in_pieces(fn, key, out_shardings=places, puts=puts)
    assert found == {"0": "0: 100", "1": "1: 200", "2": "2: 300"}
    assert order == ["0", "1", "2"]
    pieces = split(fn, key, joins_singles=False)
    assert pieces is not None
    assert len(pieces.pieces) == 3
