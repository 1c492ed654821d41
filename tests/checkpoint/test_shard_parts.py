"""Which parts per shard can be read from a checkpoint, and why are others not?"""

import pytest

from jaxpar.checkpoint.leaves import LeafSpec
from jaxpar.checkpoint.shard_parts import ShardParts, without

ERRORS, PARAM = "carried/reduction/w", "params/w"
SPECS = {ERRORS: LeafSpec((4, 8), "float32"), PARAM: LeafSpec((8,), "float32")}
PARTS = ShardParts({"data": 4}, ("carried/reduction",))
META = PARTS.meta()
WANTED = {name: name for name in SPECS}


def test_checkpoint_names_its_parts_and_their_axes():
    assert META == {
        "shard_parts": {"axes": {"data": 4}, "paths": ["carried/reduction"]}
    }
    assert ShardParts({"data": 4}).meta() == {}
    unsaved = ShardParts({"data": 4}, ("carried/a", "carried/b"), ("carried/a",))
    assert unsaved.meta()["shard_parts"]["paths"] == ["carried/b"]


@pytest.mark.parametrize(
    ("parts", "stored", "meta", "why"),
    [
        (PARTS, SPECS, META, None),
        (
            ShardParts({"data": 2, "replica": 2}, PARTS.per_shard),
            SPECS,
            META,
            "it was saved on data 4, not data 2 x replica 2",
        ),
        (
            ShardParts({}, PARTS.per_shard),
            SPECS,
            META,
            "it was saved on data 4, not one data shard",
        ),
        (PARTS, {PARAM: SPECS[PARAM]}, {}, "the checkpoint does not hold it"),
        (
            PARTS,
            SPECS | {ERRORS: LeafSpec((4, 9), "float32")},
            META,
            "its arrays have other shapes there",
        ),
        (ShardParts({"data": 4}, *2 * (PARTS.per_shard,)), SPECS, META, ""),
    ],
    ids=["same", "other axes", "one shard", "not there", "other shapes", "unsaved"],
)
def test_part_is_read_where_its_arrays_fit(parts, stored, meta, why):
    found = parts.anew(WANTED, SPECS, stored, meta)
    assert found == ({} if why is None else {"carried/reduction": why})
    left = without(WANTED, found)
    assert left == (WANTED if why is None else {PARAM: PARAM})


def test_part_that_is_not_wanted_is_not_begun():
    assert PARTS.anew({PARAM: PARAM}, SPECS, {PARAM: SPECS[PARAM]}, {}) == {}


def test_name_that_only_begins_alike_is_of_no_part():
    other = "carried/reduction_of_mine/w"
    assert list(PARTS.logical({other: SPECS[PARAM]}, {})) == [other]


def test_leaves_to_compare_leave_out_parts_of_either_side_that_are_not_read():
    plain = ShardParts({"data": 4})
    assert list(plain.logical(SPECS, META)) == [PARAM]
    assert list(PARTS.logical(SPECS, {})) == [PARAM]
    assert PARTS.logical(SPECS, META, kept=[ERRORS]) == SPECS
    assert plain.logical(SPECS, {}) == SPECS


def test_leaves_of_parts_that_are_not_saved_are_left_out():
    unsaved = ShardParts(unsaved=("carried/reduction",))
    assert list(unsaved.saved(SPECS)) == [PARAM]
    assert PARTS.saved(SPECS) == SPECS
