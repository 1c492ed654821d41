"""Is what an instruction moves counted for every run of it?"""

from jaxpar.compiled.hlo import parse
from jaxpar.compiled.memory_traffic import moved_bytes

PROGRAM = """
%body (state: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %state = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8,4]{1,0} get-tuple-element(%state), index=1
  %copy = f32[8,4]{1,0} copy(%x)
  ROOT %next = (s32[], f32[8,4]{1,0}) tuple(%i, %copy)
}

%condition (state: (s32[], f32[8,4])) -> pred[] {
  %state = (s32[], f32[8,4]{1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (x: f32[8,4], i: s32[]) -> f32[2,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %pair = (s32[], f32[8,4]{1,0}) tuple(%i, %x)
  %loop = (s32[], f32[8,4]{1,0}) while(%pair), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %y = f32[8,4]{1,0} get-tuple-element(%loop), index=1
  ROOT %slice = f32[2,4]{1,0} slice(%y), slice={[0:2], [0:4]}
}
"""  # noqa: E501 - as XLA prints it


def test_loops_count_every_trip_and_slices_the_slice():
    found = {one.name: number for one, number in moved_bytes(parse(PROGRAM))}
    row = 4 * 4
    assert found == {"copy": 3 * 2 * 8 * row, "slice": 2 * 2 * row}


CAST_AND_SLICED = """
%fused (whole: f32[24,8,4], other: f32[8,4]) -> bf16[8,8] {
  %whole = f32[24,8,4]{2,1,0} parameter(0)
  %cast = bf16[24,8,4]{2,1,0} convert(%whole)
  %slice = bf16[1,8,4]{2,1,0} slice(%cast), slice={[3:4], [0:8], [0:4]}
  %view = bf16[8,4]{1,0} bitcast(%slice)
  %other = f32[8,4]{1,0} parameter(1)
  %short = bf16[8,4]{1,0} convert(%other)
  ROOT %both = bf16[8,8]{1,0} concatenate(%view, %short), dimensions={1}
}

ENTRY %main (whole: f32[24,8,4], other: f32[8,4]) -> bf16[8,8] {
  %whole = f32[24,8,4]{2,1,0} parameter(0)
  %other = f32[8,4]{1,0} parameter(1)
  ROOT %layer = bf16[8,8]{1,0} fusion(%whole, %other), kind=kLoop, calls=%fused
}
"""


def test_slice_of_what_was_cast_reads_the_slice():
    """A layer's kernel, of stacked ones in fp32: 32 elements of 768."""
    found = {one.name: number for one, number in moved_bytes(parse(CAST_AND_SLICED))}
    assert found == {"layer": 4 * 32 + 4 * 32 + 2 * 64}
