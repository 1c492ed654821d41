"""Are bytes counted as kernels move them, and links by the hosts that groups span?"""

import jax
import jax.numpy as jnp

from jaxpar.compiled.collectives import Collective
from jaxpar.compiled.hlo import parse
from jaxpar.planner.work import Traffic, link_bytes, memory_traffic

PROGRAM = """
%sliced (p0: f32[8,4], p1: s32[], p2: f32[4]) -> f32[4] {
  %p0 = f32[8,4]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[4]{0} parameter(2)
  %zero = s32[] constant(0)
  %slice = f32[1,4]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,4}
  %row = f32[4]{0} bitcast(%slice)
  ROOT %sum = f32[4]{0} add(%row, %p2)
}

%updated (p0: f32[8,4], p1: f32[4], p2: s32[]) -> f32[8,4] {
  %p0 = f32[8,4]{1,0} parameter(0)
  %p1 = f32[4]{0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,4]{1,0} bitcast(%p1)
  ROOT %new = f32[8,4]{1,0} dynamic-update-slice(%p0, %row, %p2, %zero)
}

%multiplied (p0: f32[8,4], p1: f32[4,2]) -> f32[8,2] {
  %p0 = f32[8,4]{1,0} parameter(0)
  %p1 = f32[4,2]{1,0} parameter(1)
  ROOT %dot = f32[8,2]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

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

ENTRY %main (x: f32[8,4], w: f32[4,2], i: s32[], v: f32[4]) -> f32[8,2] {
  %x = f32[8,4]{1,0} parameter(0)
  %w = f32[4,2]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %v = f32[4]{0} parameter(3)
  %row = f32[4]{0} fusion(%x, %i, %v), kind=kLoop, calls=%sliced
  %put = f32[8,4]{1,0} fusion(%x, %row, %i), kind=kLoop, calls=%updated
  %init = (s32[], f32[8,4]{1,0}) tuple(%i, %put)
  %loop = (s32[], f32[8,4]{1,0}) while(%init), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %out = f32[8,4]{1,0} get-tuple-element(%loop), index=1
  ROOT %y = f32[8,2]{1,0} fusion(%out, %w), kind=kOutput, calls=%multiplied
}
"""  # noqa: E501 - lines as the compiler prints them


def test_bytes_of_a_program_are_those_by_hand():
    found = memory_traffic(parse(PROGRAM))
    sliced = 4 * (4 + 1 + 4 + 4)  # the row, the index, the vector; the sum
    updated = 4 * (4 + 1 + 4)  # the new row and the index; the row in its place
    looped = 3 * 4 * (32 + 32)
    assert found == Traffic(
        products=4 * (32 + 8 + 16), others=sliced + updated + looped
    )


def test_asynchronous_copies_count_once_and_beside_the_products():
    """A start and a done; the start's result lists its operands too."""
    starts = PROGRAM.replace(
        "%put = f32[8,4]{1,0} fusion(%x, %row, %i)",
        "%begun = ((f32[8,4]{1,0}, f32[4]{0}, s32[]), f32[8,4]{1,0}, u32[]) "
        "fusion-start(%x, %row, %i)",
    ).replace(
        "  %init = ",
        "  %put = f32[8,4]{1,0} fusion-done(%begun)\n  %init = ",
    )
    before, found = memory_traffic(parse(PROGRAM)), memory_traffic(parse(starts))
    updated = 4 * (4 + 1 + 4)
    assert found.products == before.products + updated
    assert found.others == before.others - updated


def test_product_of_a_real_program_reads_and_writes_its_arrays():
    x, w = jnp.ones((64, 32)), jnp.ones((32, 16))
    compiled = jax.jit(jnp.matmul).lower(x, w).compile()
    found = memory_traffic(parse(compiled.as_text() or ""))
    assert found.products == 4 * (64 * 32 + 32 * 16 + 64 * 16)


def test_links_are_told_apart():
    sizes = {"data": 4, "pipe": 1, "tensor": 2}
    rows = (
        Collective("all-gather", ("data",), "bf16", 4, 1, 4000, 4000),
        Collective("all-reduce", ("tensor",), "bf16", 2, 1, 500, 500),
    )
    inside, between = link_bytes(rows, sizes, 2), link_bytes(rows, sizes, 8)
    assert (inside.inside_host, inside.between_hosts) == (500, 3000)
    assert (between.inside_host, between.between_hosts) == (3500, 0)
