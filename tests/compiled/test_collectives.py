"""Are a program's collectives counted once, with their axes, bytes and dtypes?"""

import pytest

from jaxpar.compiled.collectives import Collective, find_sites, sum_sites
from jaxpar.compiled.hlo import parse
from tests.compiled.test_hlo import SIZES, looped

PROGRAM = """
ENTRY %main (x: f32[8], y: bf16[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %y = bf16[8]{0} parameter(1)
  LINE
  ROOT %out = f32[8]{0} add(%x, %x)
}
"""
TENSOR = "replica_groups={{0,1},{2,3},{4,5},{6,7}}"


def rows_of(line: str) -> tuple[Collective, ...]:
    return rows_in(PROGRAM.replace("LINE", line))


def rows_in(text: str) -> tuple[Collective, ...]:
    return sum_sites(find_sites(parse(text), SIZES)[0])


@pytest.mark.parametrize(
    ("groups", "axes", "size"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",), 2),
        ("{{0,2,4,6},{1,3,5,7}}", ("data",), 4),
        ("{}", ("data", "tensor"), 8),
        ("[4,2]<=[8]", ("tensor",), 2),
        ("[2,4]<=[4,2]T(1,0)", ("data",), 4),
        ("[1,8]<=[8]", ("data", "tensor"), 8),
        ("mesh['data'=4,'pipe'=1,'tensor'=2] {'data'}", ("data",), 4),
        ("mesh['data'=4,'pipe'=1,'tensor'=2] {'tensor','data'}", ("data", "tensor"), 8),
        ("mesh['data'=4,'pipe'=1,'tensor'=2] {'data':(2)2}", ("data",), 2),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", ("tensor",), 2),
        ("mesh['axis_0'=8] {'axis_0':(4)2}", ("tensor",), 2),
        ("mesh['axis_0'=8] {'axis_0':(1)4}", ("data",), 4),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", (), 1),
    ],
)
def test_groups_become_axes_however_they_are_written(groups, axes, size):
    rows = rows_in(looped(groups=groups))
    assert [(row.axes, row.group_size) for row in rows] == [(axes, size)]
    assert (rows[0].count, rows[0].bytes) == (3, 3 * 32)


def test_an_all_reduce_scatter_fusion_is_a_reduce_scatter():
    text = looped().replace("%body", "%all-reduce-scatter.1")
    rows = rows_in(text)
    assert [row.kind for row in rows] == ["reduce-scatter"]


def test_a_start_is_counted_once_and_by_its_operands():
    text = looped().replace(
        "%sum = f32[8]{0:T(128)} all-reduce(%x)",
        "%s = ((f32[8]{0}), f32[8]{0}) all-reduce-start(%x)",
    )
    text = text.replace(
        "  ROOT %t",
        "  %sum = f32[8]{0:T(128)} all-reduce-done(%s)\n  ROOT %t",
    )
    rows = rows_in(text)
    assert [(row.kind, row.count, row.bytes) for row in rows] == [("all-reduce", 3, 96)]


@pytest.mark.parametrize(
    ("line", "bytes_"),
    [
        # The unsharded array: what a gather assembles, what the others are given.
        (f"%a = f32[16]{{0}} all-gather(%x), {TENSOR}, dimensions={{0}}", 64),
        (f"%a = f32[4]{{0}} reduce-scatter(%x), {TENSOR}, dimensions={{0}}", 32),
        (f"%a = f32[8]{{0}} all-to-all(%x), {TENSOR}", 32),
        (f"%a = f32[8]{{0}} all-reduce(%x), {TENSOR}, to_apply=%add", 32),
    ],
)
def test_bytes_are_those_of_the_unsharded_array(line, bytes_):
    (row,) = rows_of(line)
    assert (row.axes, row.group_size, row.count) == (("tensor",), 2, 1)
    assert (row.bytes, row.largest) == (bytes_, bytes_)


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        # Of 800 bytes in a group of 4: rings send 3/4 of them, an all-reduce twice.
        ("all-gather", 600),
        ("reduce-scatter", 600),
        ("all-reduce", 1200),
        ("all-to-all", 600),
        ("ragged-all-to-all", 600),
        ("collective-permute", 800),
        ("collective-broadcast", 800),
    ],
)
def test_device_sends_what_the_best_known_algorithm_does(kind, sent):
    assert Collective(kind, ("data",), "f32", 4, 1, 800, 800).sent_bytes == sent


@pytest.mark.parametrize(
    ("pairs", "axes"),
    [
        ("{{0,2},{2,4},{4,6},{6,0},{1,3}}", ("data",)),
        ("{{0,1},{1,0}}", ("tensor",)),
        ("{{0,0},{1,1}}", ()),
        ("{{0,3}}", ("data", "tensor")),
    ],
)
def test_permute_spans_the_axes_along_which_it_moves(pairs, axes):
    (row,) = rows_of(
        f"%a = f32[8]{{0}} collective-permute(%x), source_target_pairs={pairs}"
    )
    assert (row.kind, row.axes, row.group_size) == ("collective-permute", axes, 2)


def test_dtypes_of_one_collective_are_rows_of_their_own():
    both = f"%a = (f32[8]{{0}}, bf16[8]{{0}}) all-reduce(%x, %y), {TENSOR}"
    rows = rows_of(both)
    found = [(row.dtype, row.count, row.bytes) for row in rows]
    assert found == [("f32", 1, 32), ("bf16", 1, 16)], "most bytes first"


def test_collective_on_a_tpu_is_counted_where_it_starts():
    """It is written again into the fusions beside which it runs, and into its end."""
    fusion = looped().replace("%body", "%async_collective_fusion.1")
    assert find_sites(parse(fusion), SIZES) == ([], ())
    text = PROGRAM.replace(
        "LINE",
        "%async-collective-done.1 = f32[8]{0} fusion(%x), kind=kCustom, calls=%ended",
    )
    ended = PROGRAM.replace("ENTRY %main", "%ended")
    ended = ended.replace("LINE", f"%a = f32[8]{{0}} all-reduce(%x), {TENSOR}")
    assert rows_in(ended + text) == ()
    started = text.replace("async-collective-done", "another")
    assert len(rows_in(ended + started)) == 1


def test_sites_name_their_instruction_and_how_often_it_runs():
    (site,), unknown = find_sites(parse(looped()), SIZES)
    assert (site.instruction.name, site.kind, site.times) == ("sum", "all-reduce", 3)
    assert (dict(site.payload), unknown) == ({"f32": 32}, ())


def test_loop_that_does_not_run_has_no_collectives():
    assert find_sites(parse(looped(end=1)), SIZES)[0] == []
