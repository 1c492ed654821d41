"""Is HLO text read right where backends and versions of XLA write it differently?"""

import pytest

from jaxpar.compiled.collectives import find_sites
from jaxpar.compiled.hlo import ArrayType, arrays, parse, runs_of, trip_count

SIZES = {"data": 4, "pipe": 1, "tensor": 2}

LOOP = """\
HloModule jit_f, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%body (p: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {
  %p = (s32[]{:T(128)}, f32[8]{0:T(128)}, s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = f32[8]{0:T(128)} get-tuple-element(%p), index=1
  %step = s32[]{:T(128)} get-tuple-element(%p), index=2
  %next = s32[]{:T(128)} add(%i, %step)
  %sum = f32[8]{0:T(128)} all-reduce(%x), replica_groups=GROUPS, to_apply=%add
  ROOT %t = (s32[]{:T(128)}, f32[8]{0:T(128)}, s32[]{:T(128)}) tuple(%next, %sum, %step)
}

%condition (p.1: (s32[], f32[8], s32[])) -> pred[] {
  %end = s32[]{:T(128)} constant(END)
  %p.1 = (s32[]{:T(128)}, f32[8]{0:T(128)}, s32[]{:T(128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i.1, %end), direction=LT
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (arg: f32[8]) -> f32[8] {
  %arg = f32[8]{0} parameter(0), metadata={op_name="x"}
  %zero = s32[] constant(1)
  %start = s32[]{:T(128)} copy(%zero)
  %two = s32[] constant(2)
  %init = (s32[], f32[8]{0}, s32[]) tuple(%start, %arg, %two)
  %while = (s32[], f32[8]{0}, s32[]) while(%init), condition=%condition, body=%body
  ROOT %out = f32[8]{0} get-tuple-element(%while), index=1
}
"""


def looped(end: int = 7, groups: str = "{{0,1},{2,3},{4,5},{6,7}}") -> str:
    return LOOP.replace("END", str(end)).replace("GROUPS", groups)


def test_a_loop_without_a_count_is_counted_from_its_own_counter():
    # From 1, below END, by steps of 2.
    for end, trips in ((7, 3), (8, 4), (1, 0)):
        module = parse(looped(end))
        loop = module.entry.instructions["while"]
        assert trip_count(module, module.entry, loop) == trips
        assert runs_of(module)[0]["body"] == trips


def test_a_loop_that_cannot_be_counted_is_named():
    text = looped().replace("direction=LT", "direction=NE")
    sites, unknown = find_sites(parse(text), SIZES)
    assert unknown == ("while",)
    assert sites[0].times == 1


def test_an_annotated_count_is_believed():
    text = looped().replace(
        "body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}'
    )
    assert runs_of(parse(text))[0]["body"] == 5


def test_branches_run_as_often_as_they_are_said_to_be_taken():
    text = """
%idle (x: f32[8]) -> f32[8] {
  ROOT %x = f32[8]{0} parameter(0)
}

%busy (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %y = f32[8]{0} add(%x, %x)
}

ENTRY %main (i: s32[], x: f32[8]) -> f32[8] {
  %i = s32[] parameter(0)
  %x = f32[8]{0} parameter(1)
  ROOT %y = f32[8]{0} conditional(%i, %x, %x), branch_computations={%idle, %busy}
}
"""
    for taken in (0.0, 1.0):
        runs = runs_of(parse(text, taken))[0]
        assert runs == {"main": 1, "idle": taken, "busy": taken}
    looped = text.replace("ENTRY %main", "%body")
    looped += """
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %y = f32[8]{0} while(%x), condition=%idle, body=%body, backend_config={"known_trip_count":{"n":"11"}}
}
"""  # noqa: E501
    assert runs_of(parse(looped, 8 / 11))[0]["busy"] == 8


@pytest.mark.parametrize(
    ("text", "size", "padded"),
    [
        ("f32[768]{0}", 3072, 3072),
        ("bf16[12,768]{1,0:T(8,128)(2,1)}", 18_432, 24_576),
        ("f32[50257,768]{1,0:T(8,128)}", 154_389_504, 154_411_008),
        ("f32[768,3]{0,1:T(4,128)}", 9216, 12_288),
        ("s32[]{:T(128)}", 4, 512),
        ("pred[8]{0}", 8, 8),
        ("s4[7]{0}", 4, 4),
    ],
)
def test_tiles_pad_the_minor_dims(text, size, padded):
    (array,) = arrays(text)
    assert (array.bytes, array.padded_bytes) == (size, padded)


def test_strings_and_nested_brackets_do_not_end_an_attribute():
    module = parse(looped(groups="[2,4]<=[4,2]T(1,0)"))
    reduce = module.computations["body"].instructions["sum"]
    assert reduce.attribute("replica_groups") == "[2,4]<=[4,2]T(1,0)"
    assert reduce.attribute("missing") == ""
    assert reduce.types == (ArrayType("f32", (8,), "0:T(128)"),)


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match=r"no ENTRY computation.*as_text"):
        parse("module @jit_f {\n}\n")
