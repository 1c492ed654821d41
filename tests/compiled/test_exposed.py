"""Is what a schedule exposes read as its lines say, in programs of known times?"""

import pytest

from tests.compiled.schedules import (
    DATA,
    communication,
    done,
    exposed,
    kernel,
    program,
    start,
)


def test_kernels_between_start_and_done_hide_a_collective():
    found = communication(
        program(
            kernel("before", 7),
            start("s"),
            kernel("beside", 3),
            done("d", "s"),
            kernel("after", 7),
            "%out = u8[4]{0} bitcast(%d)",
        )
    )
    (row,) = found.by_kind
    assert (row.kind, row.axes) == ("all-reduce", ("tensor",))
    assert (row.count, row.num_sync, row.sent_bytes) == (1, 0, 4)
    assert (row.wire_seconds, row.exposed_seconds) == (4.0, 1.0)
    assert (found.kernel_seconds, found.exposed_seconds) == (17.0, 1.0)


@pytest.mark.parametrize(
    "line",
    [
        start("d", sync=True),
        "%d = u8[4]{0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add",
    ],
)
def test_a_synchronous_collective_is_exposed_whole(line):
    found = communication(program(line, kernel("k", 9), "%out = u8[4]{0} bitcast(%d)"))
    (row,) = found.by_kind
    assert (row.count, row.num_sync, row.exposed_seconds) == (1, 1, 4.0)


def test_two_in_flight_do_not_hide_behind_the_same_kernels():
    lines = (
        start("one"),
        start("two", "y"),
        kernel("k", 6),
        done("d1", "one"),
        done("d2", "two", 8),
        "%out = u8[4]{0} bitcast(%d1)",
    )
    # On one wire the second ends at 4 + 8; the kernel at 6.
    assert exposed(program(*lines)) == {"one": 0.0, "two": 6.0}


def test_links_inside_and_between_hosts_carry_a_collective_each():
    lines = (
        start("one"),
        start("two", groups=DATA),
        kernel("k", 6),
        done("d1", "one"),
        done("d2", "two"),
        "%out = u8[4]{0} bitcast(%d1)",
    )
    # 4 bytes at 0.5 a second between hosts, at once.
    assert exposed(program(*lines)) == {"one": 0.0, "two": 2.0}
    found = communication(program(*lines)).by_kind
    assert [row.axes for row in found] == [
        ("data",),
        ("tensor",),
    ]  # Most exposed first.


LOOP = """
%body (carry: (s32[], u8[4])) -> (s32[], u8[4]) {
  %carry = (s32[], u8[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %x.1 = u8[4]{0} get-tuple-element(%carry), index=1
  %s = u8[4]{0} all-reduce-start(%x.1), replica_groups={{0,1},{2,3}}, to_apply=%add
  %k = u8[3]{0} iota(), iota_dimension=0
  %d = u8[4]{0} all-reduce-done(%s)
  ROOT %next = (s32[], u8[4]{0}) tuple(%i, %d)
}

%condition (carry.1: (s32[], u8[4])) -> pred[] {
  %carry.1 = (s32[], u8[4]{0}) parameter(0)
  ROOT %more = pred[] custom-call(%carry.1), custom_call_target="more"
}
"""
START_LOOP = (
    "%zero = s32[] constant(0)",
    "%init = (s32[], u8[4]{0}) tuple(%zero, %x)",
)


def loop(trips: int | None) -> str:
    """A loop over `LOOP`, of so many trips."""
    known = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    return (
        "%loop = (s32[], u8[4]{0}) while(%init), condition=%condition, body=%body"
        + (known if trips is not None else "")
    )


OUT = "%out = u8[4]{0} get-tuple-element(%loop), index=1"


@pytest.mark.parametrize(("trips", "times"), [(5, 5), (1, 1), (None, 1), (0, 0)])
def test_a_loop_counts_its_trips_and_once_where_they_are_unknown(trips, times):
    found = communication(program(*START_LOOP, loop(trips), OUT, before=LOOP))
    assert found.exposed_seconds == times * 1.0
    assert found.kernel_seconds == times * 3.0
    assert found.wire_seconds == times * 4.0


def test_a_loop_hides_what_is_in_flight_around_it():
    lines = (
        *START_LOOP,
        start("outer", "y", DATA),
        loop(5),
        done("d2", "outer", 8),
        OUT,
    )
    # The loop takes 5 x (3 + 1); 8 bytes at 0.5 take 16.
    assert exposed(program(*lines, before=LOOP)) == {"s": 5.0, "outer": 0.0}
    # On the same link the first trips wait: 8 for the outer one, then 4 a trip.
    lines = tuple(line.replace(DATA, "{{0,1},{2,3}}") for line in lines)
    assert exposed(program(*lines, before=LOOP)) == {"s": 9.0 + 4.0, "outer": 0.0}


BRANCHES = """
%long (p: u8[4]) -> u8[4] {
  %p = u8[4]{0} parameter(0)
  %k.1 = u8[9]{0} iota(), iota_dimension=0
  ROOT %r = u8[4]{0} all-reduce(%p), replica_groups={{0,1},{2,3}}, to_apply=%add
}

%short (q: u8[4]) -> u8[4] {
  ROOT %q = u8[4]{0} parameter(0)
}
"""


@pytest.mark.parametrize("taken", [1.0, 0.5])
def test_a_conditional_lasts_as_long_as_its_longest_branch(taken):
    lines = (
        "%flag = pred[] constant(false)",
        start("s", "y", DATA),
        "%c = u8[4]{0} conditional(%flag, %x, %x), true_computation=%short, "
        "false_computation=%long",
        done("d", "s", 8),
        "%out = u8[4]{0} bitcast(%c)",
    )
    found = exposed(program(*lines, before=BRANCHES), taken)
    # 9 + 4 seconds beside 16; its own collective is in the branch that is taken.
    assert found == {"s": 3.0, "r": taken * 4.0}


def test_a_collective_that_nothing_ends_is_waited_for_at_the_end():
    lines = (start("s"), kernel("k", 3), "%out = u8[4]{0} bitcast(%x)")
    assert exposed(program(*lines)) == {"s": 1.0}


def test_copies_beside_the_kernels_hide_nothing_and_take_no_time():
    lines = (
        start("s"),
        "%c = (u8[8]{0}, u8[8]{0}, u32[]) copy-start(%y)",
        "%sent = (u8[8]{0}, u32[], token[]) send(%y)",
        "%e = u8[8]{0} copy-done(%c)",
        done("d", "s"),
        "%out = u8[4]{0} bitcast(%d)",
    )
    found = communication(program(*lines))
    assert (found.kernel_seconds, found.exposed_seconds) == (0.0, 4.0)


def test_a_wrapped_collective_ends_at_its_done():
    inner = """
%wrapped (p: u8[8]) -> u8[4] {
  %p = u8[8]{0} parameter(0)
  ROOT %rs = u8[4]{0} reduce-scatter(%p), dimensions={0}, to_apply=%add, \
replica_groups={{0,1},{2,3}}
}
"""
    lines = (
        "%s = ((u8[8]{0}), u8[4]{0}) async-start(%y), calls=%wrapped",
        kernel("k", 3),
        "%u = ((u8[8]{0}), u8[4]{0}) async-update(%s), calls=%wrapped",
        "%d = u8[4]{0} async-done(%u), calls=%wrapped",
        kernel("after", 9),
        "%out = u8[4]{0} bitcast(%d)",
    )
    assert exposed(program(*lines, before=inner)) == {"rs": 1.0}
