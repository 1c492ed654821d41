"""Do flat buckets hold the shards of each device, in order, and give them back?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.optim.buckets import Bucket, Buckets
from jaxpar.sharding.zero import shard_leaves, zero_stage
from kernels_pallas.fused_optimizers import TILE
from tests.optim.sharded_params import leaf_shardings, make_params, mesh, placed


def buckets(zero: int = 1) -> Buckets:
    return Buckets(leaf_shardings(zero), mesh())


def test_shards_are_padded_to_tiles_and_concatenated():
    bucket = Bucket(("data",), (0, 3, 4), ((2, 3), (TILE,), (TILE + 1,)))
    pieces = [np.arange(np.prod(s)).reshape(s) + 1.0 for s in bucket.shapes]
    flat = bucket.flat([jnp.asarray(piece) for piece in pieces])
    right = np.zeros(4 * TILE)
    right[:6], right[TILE : 2 * TILE] = pieces[0].ravel(), pieces[1]
    right[2 * TILE : 3 * TILE + 1] = pieces[2]
    np.testing.assert_array_equal(flat, right)
    assert bucket.tiles == (1, 1, 2)
    np.testing.assert_array_equal(bucket.leaf_of_tiles, [0, 1, 2, 2])
    for piece, back in zip(pieces, bucket.pieces(flat), strict=True):
        np.testing.assert_array_equal(back, piece)


def test_leaf_without_elements_takes_no_tile():
    bucket = Bucket((), (0, 1), ((3, 0), (2,)))
    flat = bucket.flat([jnp.zeros((3, 0)), jnp.ones(2)])
    assert (bucket.tiles, flat.shape) == ((0, 1), (TILE,))
    assert [x.shape for x in bucket.pieces(flat)] == [(3, 0), (2,)]


def test_scalar_takes_one_element():
    bucket = Bucket((), (0,), ((),))
    flat = bucket.flat([jnp.float32(3)])
    assert flat[0] == 3
    assert bucket.pieces(flat)[0].shape == ()


@pytest.mark.parametrize(
    ("axes", "name", "spec"),
    [
        ((), "whole", P()),
        (("data",), "over_data", P("data")),
        (("data", "tensor"), "over_data_tensor", P(("data", "tensor"))),
    ],
)
def test_bucket_is_named_and_split_by_its_axes(axes, name, spec):
    bucket = Bucket(axes, (0,), ((1,),))
    assert bucket.name == name
    assert bucket.spec == (P(axes) if axes else P())
    assert spec in (bucket.spec, P(*axes))


def test_leaves_over_the_same_axes_share_a_bucket():
    found = buckets().by_name
    assert {name: bucket.members for name, bucket in found.items()} == {
        "whole": (0,),
        "over_data_tensor": (1, 2),
    }
    # Of 3 x 64 x 24 and 64 x 16 elements each device has an eighth.
    sizes = [int(np.prod(shape)) for shape in found["over_data_tensor"].shapes]
    assert sizes == [576, 128]
    assert buckets(zero=0).by_name.keys() == {"whole", "over_tensor"}


def test_axis_of_one_device_splits_nothing():
    data = make_mesh(MeshShape(data=8))
    struct = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    (leaf,) = shard_leaves(
        struct, {"w": (None, "tensor")}, zero_stage(1), data.shape
    ).values()
    assert "tensor" in str(leaf.stored_spec)
    assert list(Buckets((leaf,), data).by_name) == ["over_data"]


def test_padding_is_the_fraction_of_tiles_that_nothing_fills():
    assert buckets().filling == pytest.approx(1 - (6 + 576 + 128) / (3 * TILE))
    assert Buckets((), mesh()).filling == 0


def test_every_device_packs_its_own_shards():
    params = placed(make_params())
    packed = buckets().pack(list(params.values()))
    names = {0: "bias", 1: "blocks", 2: "kernel"}
    for name, bucket in buckets().by_name.items():
        for piece in packed[name].addressable_shards:
            own = [
                next(
                    np.asarray(s.data)
                    for s in params[names[member]].addressable_shards
                    if s.device == piece.device
                )
                for member in bucket.members
            ]
            right = [np.pad(x.ravel(), (0, TILE - x.size)) for x in own]
            np.testing.assert_array_equal(piece.data, np.concatenate(right))


def test_packing_and_unpacking_give_the_leaves_without_a_collective():
    made, both = buckets(), make_params()
    program = jax.jit(lambda leaves: made.unpack(made.pack(leaves)))
    leaves = list(placed(both).values())
    for back, leaf in zip(program(leaves), both.values(), strict=True):
        np.testing.assert_array_equal(back, leaf)
    text = program.lower(leaves).compile().as_text() or ""
    assert "ENTRY" in text
    assert not [op for op in ("all-gather", "all-reduce", "permute(") if op in text]


def test_functions_see_the_flat_shard_of_a_device():
    made, shapes = buckets(), []

    def halves(flat):
        shapes.append(flat.shape)
        return {"high": flat * 2, "low": -flat}

    packed = made.pack(list(placed(make_params()).values()), halves)
    assert sorted(shapes) == [(TILE,), (2 * TILE,)]
    back = made.unpack(packed, lambda parts: parts["high"] + parts["low"])
    for leaf, right in zip(back, make_params().values(), strict=True):
        np.testing.assert_allclose(leaf, right, rtol=1e-6)
