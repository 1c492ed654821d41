"""Is a kernel's category what it is for, and are launches in loops counted apart?"""

import pytest

from jaxpar.compiled.categories import (
    ACTIVATIONS,
    ATTENTION,
    COLLECTIVES,
    COPIES,
    LOGITS,
    LOSS,
    OPTIMIZER,
    REST,
    TRANSPOSES,
    TRUNK,
    Moved,
    category_of,
    moved_by_category,
    total,
)
from jaxpar.compiled.hlo import parse

PROGRAM = """
%turn (a: bf16[8,4]) -> bf16[4,8] {
  %a = bf16[8,4]{1,0} parameter(0)
  %c = f32[8,4]{1,0} convert(%a)
  ROOT %t = bf16[4,8]{1,0} transpose(%c), dimensions={1,0}
}

%curve (b: bf16[8,4]) -> bf16[8,4] {
  %b = bf16[8,4]{1,0} parameter(0)
  ROOT %tanh = bf16[8,4]{1,0} tanh(%b)
}

%sum (d: bf16[8,4]) -> bf16[8,4] {
  %d = bf16[8,4]{1,0} parameter(0)
  ROOT %add = bf16[8,4]{1,0} add(%d, %d)
}

%body (state: (s32[], bf16[8,50])) -> (s32[], bf16[8,50]) {
  %state = (s32[], bf16[8,50]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %l = bf16[8,50]{1,0} get-tuple-element(%state), index=1
  %loss = bf16[8,50]{1,0} exponential(%l)
  ROOT %next = (s32[], bf16[8,50]{1,0}) tuple(%i, %loss)
}

%more (state: (s32[], bf16[8,50])) -> pred[] {
  %state = (s32[], bf16[8,50]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (x: bf16[8,4], w: bf16[4,4], v: bf16[4,50], i: s32[]) -> bf16[8,50] {
  %x = bf16[8,4]{1,0} parameter(0)
  %w = bf16[4,4]{1,0} parameter(1)
  %v = bf16[4,50]{1,0} parameter(2)
  %i = s32[] parameter(3)
  %turned = bf16[4,8]{1,0} fusion(%x), kind=kLoop, calls=%turn
  %curved = bf16[8,4]{1,0} fusion(%x), kind=kLoop, calls=%curve
  %added = bf16[8,4]{1,0} fusion(%x), kind=kLoop, calls=%sum
  %moment = bf16[8,4]{1,0} fusion(%x), kind=kLoop, calls=%sum, metadata={op_name="jit(f)/update/add"}
  %copied = bf16[8,4]{1,0} copy(%x)
  %trunk = bf16[8,4]{1,0} custom-call(%x, %w), custom_call_target="__cublas$gemm"
  %logits = bf16[8,50]{1,0} dot(%x, %v), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %seen = bf16[8,4]{1,0} custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"
  %sent = bf16[8,4]{1,0} all-reduce(%x), replica_groups={}
  %pair = (s32[], bf16[8,50]{1,0}) tuple(%i, %logits)
  %loop = (s32[], bf16[8,50]{1,0}) while(%pair), condition=%more, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %end = bf16[8,50]{1,0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501 - as XLA prints it
MODULE = parse(PROGRAM)
X, V = 2 * 8 * 4, 2 * 8 * 50


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("turned", TRANSPOSES),
        ("curved", ACTIVATIONS),
        ("added", REST),
        ("moment", OPTIMIZER),
        ("copied", COPIES),
        ("trunk", TRUNK),
        ("logits", LOGITS),
        ("seen", ATTENTION),
        ("sent", COLLECTIVES),
    ],
)
def test_kernel_is_of_its_category(name: str, category: str):
    entry = MODULE.entry
    assert category_of(entry.instructions[name], entry, MODULE, 50) == category


def test_launches_in_loops_are_apart_and_bytes_are_of_every_trip():
    found = moved_by_category(MODULE, 50)
    assert found[LOSS] == Moved(0, 3, 3 * 2 * V)
    assert found[REST] == Moved(1, 0, 2 * X)
    assert next(iter(found)) == LOSS, "most bytes first"
    assert total(found).launches == 9
    assert total(found).in_loops == 3
