"""Is what a compiled program moves and holds read right, on CPU, GPU and TPU?

By a shard_map program whose every collective and byte is known: loops, several axes,
several dtypes, starts and fusions as each backend writes them.
"""

import pytest

from tests.compiled.programs import LAYERS, ROWS, WIDTH, read_known

ACTIVATION = ROWS * WIDTH * 4
KERNEL = WIDTH * WIDTH * 4


@pytest.fixture(scope="module", params=["cpu", "gpu", "tpu"])
def program(request, compiled):
    return compiled(read_known, request.param)


def test_loops_are_counted_by_their_trips(program):
    rows = {(row.kind, row.axes): row for row in program.collectives}
    gather = rows["all-gather", ("data",)]
    assert (gather.count, gather.bytes) == (LAYERS, LAYERS * KERNEL)
    assert (gather.largest, gather.group_size) == (KERNEL, 4)
    reduce = rows["all-reduce", ("tensor",)]
    assert (reduce.count, reduce.bytes) == (LAYERS, LAYERS * ACTIVATION)
    assert program.unknown_loops == ()


def test_every_kind_is_read_with_its_axes(program):
    assert program.communicated_bytes("reduce-scatter", "data") == ACTIVATION
    assert program.communicated_bytes("collective-permute", "tensor") == ACTIVATION
    assert program.communicated_bytes("all-reduce", "data", "tensor") == 4
    assert program.communicated_bytes("all-gather") == LAYERS * KERNEL


def test_dtypes_on_the_wire_count(program):
    # XLA:CPU may widen bf16 to fp32 on the way; it then says so.
    (swap,) = (row for row in program.collectives if row.kind == "all-to-all")
    assert swap.axes == ("data",)
    assert swap.bytes == 8 * WIDTH * {"bf16": 2, "f32": 4}[swap.dtype]


def test_sent_bytes_are_a_rings(program):
    rows = {row.kind: row for row in program.collectives if row.axes != ("tensor",)}
    assert rows["all-gather"].sent_bytes == LAYERS * KERNEL * 3 // 4
    assert rows["reduce-scatter"].sent_bytes == ACTIVATION * 3 // 4


def test_arguments_are_read_by_name(program):
    assert program.bytes_of("x") == ACTIVATION
    assert program.bytes_of("kernels") == LAYERS * KERNEL // 4
    total = sum(program.bytes_of(name) for name in ("x", "kernels", "y"))
    assert total == program.memory.arguments


def test_memory_is_whole(program):
    memory = program.memory
    assert memory.outputs >= ACTIVATION // 4 + ACTIVATION
    assert memory.peak >= memory.arguments + memory.outputs - memory.aliased
    assert memory.on_host == 0
