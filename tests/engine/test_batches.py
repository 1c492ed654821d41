"""Does a batch reach the devices as the sample says, or an error say how it differs?"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.engine.batches import make_batch_spec
from jaxpar.mesh import MeshShape, make_mesh

ROWS = 16


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshShape(data=4, tensor=2))


def make_batch(rows=ROWS):
    return {
        "tokens": np.arange(rows * 3, dtype=np.int32).reshape(rows, 3),
        "mask": (np.ones(rows, np.bool_), np.linspace(0, 1, rows, dtype=np.float32)),
    }


@pytest.fixture(scope="module")
def spec(mesh):
    return make_batch_spec(make_batch(), mesh, accumulate=2)


def test_spec_reads_shapes_dtypes_and_rows(spec):
    assert {n: (x.shape, x.dtype.name) for n, x in spec.leaves.items()} == {
        "mask/0": ((ROWS,), "bool"),
        "mask/1": ((ROWS,), "float32"),
        "tokens": ((ROWS, 3), "int32"),
    }
    assert spec.num_rows == ROWS


def test_sample_may_be_shapes_alone(spec, mesh):
    structs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_batch()
    )
    assert make_batch_spec(structs, mesh, 2) == spec


def test_rows_keep_everything_else(spec):
    rows = spec.rows(2)
    assert rows["tokens"].shape == (2, 3)
    assert rows["mask"][0].shape == (2,)
    assert jax.tree.structure(rows) == jax.tree.structure(make_batch())


def test_put_splits_rows_over_data_and_keeps_them_whole_over_tensor(spec, mesh):
    placed, batch = spec.put(make_batch()), make_batch()
    assert jax.tree.all(jax.tree.map(np.array_equal, placed, batch))
    for leaf in jax.tree.leaves(placed):
        rests = NamedSharding(mesh, P("data"))
        assert leaf.sharding.is_equivalent_to(rests, leaf.ndim)
        assert leaf.addressable_shards[0].data.shape[0] == ROWS // 4


def test_global_array_is_taken_as_it_lies(spec, mesh):
    whole = jax.device_put(make_batch(), NamedSharding(mesh, P()))
    placed = spec.put(whole)
    assert np.array_equal(placed["tokens"], make_batch()["tokens"])
    assert placed["tokens"].sharding.spec == P("data")


def test_wide_dtypes_are_those_that_jax_makes_of_them(mesh):
    wide = {"x": np.ones((8, 2), np.float64), "y": np.ones(8, np.int64)}
    spec = make_batch_spec(wide, mesh, 1)
    assert {n: x.dtype.name for n, x in spec.leaves.items()} == {
        "x": "float32",
        "y": "int32",
    }
    placed = spec.put({"x": np.full((8, 2), 0.5), "y": np.arange(8)})
    assert (placed["x"].dtype, placed["y"].dtype) == (jnp.float32, jnp.int32)
    assert np.array_equal(placed["y"], np.arange(8))


def test_half_precision_and_unsigned_leaves_are_numbers(mesh):
    leaves = {"h": jnp.ones(8, jnp.bfloat16), "b": np.ones(8, np.uint8)}
    spec = make_batch_spec(leaves, mesh, 1)
    assert spec.leaves["h"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("rows", "whole", "sizes"),
    [
        (4, False, (4, None)),
        (4, True, (4, None)),
        (7, False, (4, 3)),
        (7, True, (None, 7)),
        (3, False, (None, 3)),
        (16, True, (16, None)),
    ],
)
def test_any_number_of_rows_is_placed_in_two_parts(spec, rows, whole, sizes):
    """What data divides, or nothing of a whole batch, and the rest on every device."""
    batch = make_batch(rows)
    parts = spec.put_any(batch, whole=whole)
    found = [None if part is None else len(part["tokens"]) for part in parts]
    assert found == list(sizes)
    for part, axes in zip(parts, (P("data"), P()), strict=True):
        for leaf in jax.tree.leaves(part):
            assert leaf.sharding.spec == axes
    some = [np.asarray(part["tokens"]) for part in parts if part is not None]
    assert np.array_equal(np.concatenate(some), batch["tokens"])


def test_parts_that_are_not_rows_are_whole_beside_any_number_of_rows(mesh):
    batch = {"x": np.arange(8), "scale": jaxpar.Replicated(np.arange(3.0))}
    spec = make_batch_spec(batch, mesh, 1)
    parts = spec.put_any({**batch, "x": np.arange(7)}, whole=False)
    assert [len(part["x"]) for part in parts] == [4, 3]
    for part in parts:
        assert np.array_equal(part["scale"].value, np.arange(3.0))
        assert part["scale"].value.sharding.spec == P()


@pytest.mark.parametrize(
    "batch",
    [make_batch(0), {"tokens": np.int32(1), "mask": (np.bool_(1), np.float32(1))}],
)
def test_no_rows_raise(spec, batch):
    message = "batch: it has no rows, on any process; pass one or more"
    with pytest.raises(ValueError, match=message):
        spec.put_any(batch, whole=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: None, r"batch: its structure PyTreeDef\(None\) differs from the "
         r"sample batch's .*\. Pass the same leaves as in sample_batch"),
        (lambda b: {"tokens": b["tokens"]}, "batch: its structure .* differs from"),
        (lambda b: b | {"extra": b["tokens"]}, "batch: its structure .* differs from"),
        (lambda b: b | {"mask": list(b["mask"])}, "batch: its structure .* differs"),
        (lambda b: b | {"tokens": b["tokens"].tolist()}, r"batch: leaf tokens is a "
         r"list of numbers, not an array; convert it with np"),
        (lambda b: b | {"mask": (b["mask"][0], tuple(b["mask"][1]))}, "batch: leaf "
         r"mask/1 is a tuple of numbers, not an array"),
        (lambda b: make_batch(8), r"batch: leaf mask/0 is bool\[8\], but must be "
         r"bool\[16\], as in sample_batch\."),
        (lambda b: b | {"tokens": b["tokens"][:, :2]}, r"batch: leaf tokens is "
         r"int32\[16, 2\], but must be int32\[16, 3\], as in sample_batch"),
        (lambda b: b | {"tokens": b["tokens"] * 1.0}, r"batch: leaf tokens is "
         r"float64\[16, 3\], but must be int32\[16, 3\]"),
        (lambda b: b | {"tokens": b["tokens"].astype(np.int64)[:8]}, r"batch: leaf "
         r"tokens is int32\[8, 3\], but must be int32\[16, 3\]"),
        (lambda b: b | {"tokens": 3}, r"batch: leaf tokens is int, not an array of "
         r"numbers; convert it with np\.asarray, or leave it out"),
        (lambda b: b | {"tokens": np.array(["a"])}, r"batch: leaf tokens is <U1, not"),
    ],
)  # fmt: skip
def test_batch_that_differs_from_the_sample_raises(spec, change, message):
    with pytest.raises(ValueError, match=message):
        spec.put(change(make_batch()))


def test_other_rows_in_one_leaf_raise_at_any_number_too(spec):
    batch = make_batch(8) | {"tokens": make_batch(4)["tokens"]}
    with pytest.raises(ValueError, match=r"leaf tokens is int32\[4, 3\], but must be"):
        spec.put_any(batch, whole=False)


def test_process_passes_its_own_rows_only(spec, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    message = r"must be bool\[8\], this process's of 16 rows, as in sample_batch"
    with pytest.raises(ValueError, match=message):
        spec.put(make_batch())


@pytest.mark.parametrize("accumulate", [0, -1, 2.0, None])
def test_accumulate_that_is_no_number_of_microbatches_raises(
    mesh, accumulate, unchecked_types
):
    message = rf"accumulate={accumulate} must be a positive number of micro-batches"
    with pytest.raises(ValueError, match=message):
        make_batch_spec(make_batch(), mesh, accumulate)


@pytest.mark.parametrize(
    ("sample", "rows"),
    [
        (None, r"\{\}"),
        ({}, r"\{\}"),
        ({"x": np.ones((4, 2)), "y": np.ones(8)}, r"\{'x': 4, 'y': 8\}"),
        ({"x": np.ones((4, 2)), "n": np.int32(3)}, r"\{'n': None, 'x': 4\}"),
    ],
)
def test_sample_without_common_rows_raises(mesh, sample, rows):
    message = (
        rf"sample_batch: rows by leaf are {rows}; every leaf must have the same number "
        r"of rows as its leading dim \(at least one leaf\)"
    )
    with pytest.raises(ValueError, match=message):
        make_batch_spec(sample, mesh, 1)


@pytest.mark.parametrize(("rows", "accumulate"), [(12, 2), (4, 2), (0, 1), (16, 3)])
def test_rows_that_do_not_divide_raise(mesh, rows, accumulate):
    need = 4 * accumulate
    message = (
        rf"sample_batch: {rows} rows must be a multiple of data x accumulate = "
        rf"4 x {accumulate} = {need}\. Change the batch, the mesh or accumulate"
    )
    with pytest.raises(ValueError, match=message):
        make_batch_spec(make_batch(rows), mesh, accumulate)


@pytest.mark.parametrize(
    ("leaf", "found"),
    [
        (3.0, "x is float"),
        (np.array(["a"] * 8), "x is <U1"),
        (object(), "x is"),
    ],
)
def test_leaf_that_is_no_array_of_numbers_raises(mesh, leaf, found):
    message = rf"sample_batch: leaf {found}.*, not an array of numbers; convert it with"
    with pytest.raises(ValueError, match=message):
        make_batch_spec({"x": leaf}, mesh, 1)


@pytest.mark.parametrize(
    ("leaf", "found"),
    [
        ([1.0] * 8, "x is a list"),
        (tuple(range(8)), "x is a tuple"),
        ([[0, 1], [2, 3]], "x is a list"),
        ([np.float32(1), np.float32(2)], "x is a list"),
        ([{"y": [1, 2]}], "x/0/y is a list"),
    ],
)
def test_list_of_numbers_raises(mesh, leaf, found):
    message = rf"sample_batch: leaf {found} of numbers, not an array; convert it with"
    with pytest.raises(ValueError, match=message):
        make_batch_spec({"x": leaf}, mesh, 1)


def test_list_of_arrays_is_leaves(mesh):
    spec = make_batch_spec([np.ones(8), (np.ones((8, 2)),)], mesh, 1)
    assert list(spec.leaves) == ["0", "1/0"]


def test_keys_are_no_numbers(mesh):
    keys = jax.random.split(jax.random.key(0), 8)
    with pytest.raises(
        ValueError, match=r"leaf k is key<fry>, not an array of numbers"
    ):
        make_batch_spec({"k": keys}, mesh, 1)


def test_spec_is_frozen(spec):
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.num_rows = 3


def test_shapes_fit_by_the_rows_of_a_process(monkeypatch):
    mesh = make_mesh(MeshShape(data=2), jax.devices()[:2])
    sample = {"x": np.ones((8, 3), np.float32), "w": jaxpar.Replicated(np.ones(5))}
    spec = make_batch_spec(sample, mesh, 1)

    def batch(rows, length=3, width=5):
        x = np.ones((rows, length), np.float32)
        return {"x": x, "w": jaxpar.Replicated(np.ones(width))}

    assert spec.fits(batch(8))
    assert not spec.fits(batch(4))
    assert spec.fits(batch(4), any_rows=True)
    assert not spec.fits(batch(4, 2), any_rows=True)
    assert not spec.fits(batch(8, width=4), any_rows=True)
    assert not spec.fits({"x": np.ones((8, 3), np.float32)})
    assert str(spec) == "w/value float32[5], x float32[8, 3]"
    assert spec.num_elements == 8 * 3 + 5
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert spec.fits(batch(4))
    assert not spec.fits(batch(8))
    assert spec.fits({**batch(8), "x": jnp.ones((8, 3))})
