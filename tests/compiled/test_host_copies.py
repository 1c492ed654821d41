"""Are copies to and from the host found, in the forms that compilers print?"""

import pytest

from jaxpar.compiled.hlo import parse
from jaxpar.compiled.host_copies import find_host_copies
from jaxpar.compiled.link_rates import TO_DEVICE, TO_HOST
from tests.compiled.schedules import communication, exposed, kernel, program

HOST, HERE = "u8[16]{0:S(5)}", "u8[4]{0}"
SLICED = f"""
%read (h: u8[16], i: s32[]) -> u8[4] {{
  %h = {HOST} parameter(0)
  %i = s32[] parameter(1)
  ROOT %part = {HERE} dynamic-slice(%h, %i), dynamic_slice_sizes={{4}}
}}
"""
READ = (
    f"%r = (({HOST}, s32[]), {HERE}, u32[]) fusion-start(%h.1, %at), kind=kCustom, "
    "calls=%read"
)
WRITE = (
    f"%w = (({HOST}, {HERE}, s32[]), {HOST}, u32[]) "
    "dynamic-update-slice-start(%h.1, %x, %at)"
)
BEFORE = (f"%h.1 = {HOST} parameter(2)", "%at = s32[] constant(0)")


def copies(*lines: str) -> list[tuple]:
    text = program(*BEFORE, *lines, "%out = u8[4]{0} bitcast(%x)", before=SLICED)
    return [(x.axes, x.sent_bytes, x.times) for x in find_host_copies(parse(text))]


@pytest.mark.parametrize(
    ("line", "over", "number"),
    [
        (READ, TO_DEVICE, 4),
        (WRITE, TO_HOST, 4),
        (f"%c = {HERE[:-3]}{{0:S(5)}} copy(%x)", TO_HOST, 4),
        (f"%c = ({HERE}, u8[4]{{0:S(5)}}, u32[]) copy-start(%h.1)", TO_DEVICE, 4),
        (f"%c = (u8[4]{{0:S(5)}}, {HERE}, u32[]) copy-start(%x)", TO_HOST, 4),
        (
            f"%c = {HERE} dynamic-slice(%h.1, %at), dynamic_slice_sizes={{4}}",
            TO_DEVICE,
            4,
        ),
    ],
)
def test_a_copy_is_found(line: str, over: tuple, number: int) -> None:
    assert copies(line) == [(over, number, 1)]


def test_what_stays_in_a_memory_is_none() -> None:
    assert copies(f"%c = {HERE} copy(%x)", f"%d = {HOST} copy(%h.1)") == []


def test_both_directions_are_busy_at_once_beside_a_kernel() -> None:
    """The host's link copies a byte a second each way."""
    lines = (
        *BEFORE,
        READ,
        WRITE,
        kernel("k", 3),
        f"%rd = {HERE} fusion-done(%r)",
        f"%wd = {HOST} dynamic-update-slice-done(%w)",
        "%out = u8[4]{0} bitcast(%rd)",
    )
    text = program(*lines, before=SLICED)
    assert exposed(text) == {"r": 1.0, "w": 0.0}
    rows = communication(text).by_kind
    assert {(row.kind, row.axes, row.wire_seconds) for row in rows} == {
        ("copy", TO_DEVICE, 4.0),
        ("copy", TO_HOST, 4.0),
    }
