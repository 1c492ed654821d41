"""What of a batch is rows, what is replicated, and what does the loss function see?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.step.inputs import (
    Inputs,
    KeyedPacks,
    OnePack,
    Packed,
    Replicated,
    abstract_inputs,
    check_packed,
    make_inputs,
    map_rows,
    num_rows,
    replicated_names,
    specs_of,
    twice_the_rows,
    unwrapped,
    with_keys,
)

X = np.arange(12.0).reshape(4, 3)
BATCH = {"w": Replicated({"a": np.ones(5), "b": np.ones(())}), "x": X}


def test_only_rows_are_mapped_and_counted():
    halved = map_rows(lambda x: x[:2], BATCH)
    np.testing.assert_array_equal(halved["x"], X[:2])
    assert halved["w"] is BATCH["w"]
    assert num_rows(BATCH) == 4
    assert num_rows(Inputs(BATCH, Replicated(np.int32(3)))) == 4


def test_one_pack_is_one_row_whatever_its_arrays_are():
    assert num_rows(OnePack({"nodes": X})) == 1
    assert num_rows(Packed({"nodes": X})) == 4


def test_names_and_specs_tell_rows_from_the_others():
    assert replicated_names(BATCH) == {"w/value/a", "w/value/b"}
    assert replicated_names({"x": X}) == frozenset()
    specs = jax.tree.leaves(
        specs_of(BATCH, P("data")), is_leaf=lambda x: isinstance(x, P)
    )
    assert specs == [P(), P(), P("data")]


def test_loss_function_sees_values_and_packs_without_their_wrapping():
    seen = unwrapped(BATCH)
    assert seen["w"] is BATCH["w"].value
    assert seen["x"] is X
    nested = OnePack({"nodes": X, "weight": Replicated(3.0)})
    assert unwrapped(nested) == {"nodes": X, "weight": 3.0}


def test_twice_the_rows_are_shapes_of_the_same_dtype():
    twice = twice_the_rows({"x": X.astype(np.int8), "w": Replicated(1.0)})
    assert (twice["x"].shape, twice["x"].dtype) == ((8, 3), np.int8)
    assert twice["w"] == Replicated(1.0)


def test_inputs_of_one_call_are_those_of_one_pack():
    struct = jax.ShapeDtypeStruct((4, 7, 2), jnp.float32)
    inputs = abstract_inputs(Packed({"nodes": struct}))
    assert isinstance(inputs.batch, OnePack)
    assert inputs.batch.pack["nodes"].shape == (7, 2)
    rows = abstract_inputs({"x": struct})
    assert rows.batch["x"] is struct
    step = rows.step.value
    assert (step.shape, step.dtype) == ((), jnp.int32)


def test_every_pack_has_the_key_of_its_position():
    key = jax.random.key(7)
    keyed = with_keys(make_inputs(Packed({"nodes": X}), 0), key).batch
    assert isinstance(keyed, KeyedPacks)
    right = [jax.random.key_data(jax.random.fold_in(key, i)) for i in range(4)]
    np.testing.assert_array_equal(keyed.keys, np.stack(right))
    assert keyed.packs["nodes"] is X


def test_inputs_without_packs_stay_as_they_are():
    inputs = make_inputs(BATCH, 0)
    assert with_keys(inputs, jax.random.key(0)) is inputs


@pytest.mark.parametrize(
    ("batch", "stages", "coupled", "message"),
    [
        (
            {"a": Packed(X), "b": X},
            1,
            False,
            r"jaxpar\.Packed is inside the batch, but",
        ),
        (
            Packed({"a": Packed(X)}),
            1,
            False,
            r"jaxpar\.Packed is inside the batch, but",
        ),
        (
            Packed(X),
            2,
            False,
            r"can't go through a pipeline, but pipe=2; use a mesh of",
        ),
    ],
)
def test_packs_that_can_not_be_used_raise(batch, stages, coupled, message):
    with pytest.raises(ValueError, match=f"^sample_batch: .*{message}"):
        check_packed(batch, stages, coupled_batch=coupled)


def test_coupled_packs_raise():
    message = r"^coupled_batch=True: loss_fn is called with one pack .* leave coupled_b"
    with pytest.raises(ValueError, match=message):
        check_packed(Packed(X), 1, coupled_batch=True)


def test_packs_and_plain_batches_that_can_be_used_are_taken():
    check_packed(Packed({"a": X}), 1, coupled_batch=False)
    check_packed({"a": X}, 4, coupled_batch=True)
