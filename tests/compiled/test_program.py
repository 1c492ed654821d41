"""Is what a compiled program moves and holds read right, on CPU, GPU and TPU?

By a shard_map program whose every collective and byte is known: loops, several axes,
several dtypes, starts and fusions as each backend writes them.
"""

import pytest

from jaxpar.compiled.collectives import Collective
from jaxpar.compiled.program import CompiledProgram, Memory, join_programs
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


def part(peak: int, parameters: dict[str, int], *rows: Collective) -> CompiledProgram:
    memory = Memory(0, 0, 0, 0, peak, on_host=0)
    return CompiledProgram(memory, parameters, rows, ("loop",), ("state[2]",))


def gather(count: int, number: int, largest: int) -> Collective:
    return Collective("all-gather", ("data",), "f32", 8, count, number, largest)


def test_programs_of_one_step_are_joined():
    """State that a part does not take is alive beside it; host state never counts."""
    other = Collective("all-reduce", ("data",), "f32", 8, 1, 7, 7)
    first = part(100, {"state[0]": 10, "batch": 5}, gather(1, 30, 30), other)
    second = part(
        90, {"state[0]": 10, "state[1]": 40, "state[2]": 1000}, gather(2, 8, 4)
    )
    joined = join_programs({"gradients": first, "update": second})
    assert joined.memory.peak == 100 + 40
    assert joined.collectives == (gather(3, 38, 30), other)
    assert joined.unknown_loops == ("loop of gradients", "loop of update")
    assert joined.bytes_of("state") == 50
    assert list(joined.parts) == ["gradients", "update"]


def test_one_program_is_joined_to_itself():
    alone = part(100, {})
    assert join_programs({"step": alone}) is alone
