"""Is every collective told with the line of the source that it comes from?"""

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.compiled import source_lines as operations
from jaxpar.compiled.hlo import parse
from jaxpar.compiled.source_lines import Frame, Operation, read_operations, read_stacks
from tests.compiled.test_hlo import looped
from tests.model.toys import make_mesh

PACKAGE = Path(jaxpar.__file__).parent
SIZES = {"data": 4, "pipe": 1, "tensor": 2}

TEXT = """\
HloModule jit_f, entry_computation_layout={(f32[2,8]{1,0})->f32[8,8]{1,0}}

FileNames
1 "/elsewhere/train.py"
2 "PACKAGE/engine/engine.py"
3 "PACKAGE/gradients.py"
4 "/elsewhere/model.py"
5 "/python/site-packages/flax/nnx/linear.py"
6 "<@beartype(jaxpar.sharding.constrain.constrain) at 0x7f>"
7 "PACKAGE/sharding/constrain.py"
8 "PACKAGE/models/layers.py"

FunctionNames
1 "main"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=2 end_column=2}
2 {file_name_id=2 function_name_id=1 line=20 end_line=20 column=2 end_column=2}
3 {file_name_id=3 function_name_id=1 line=30 end_line=30 column=2 end_column=2}
4 {file_name_id=4 function_name_id=1 line=40 end_line=41 column=2 end_column=2}
5 {file_name_id=5 function_name_id=1 line=50 end_line=50 column=2 end_column=2}
6 {file_name_id=6 function_name_id=1 line=60 end_line=60 column=2 end_column=2}
7 {file_name_id=7 function_name_id=1 line=70 end_line=70 column=2 end_column=2}
8 {file_name_id=8 function_name_id=1 line=80 end_line=80 column=2 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}
4 {file_location_id=4 parent_frame_id=4}
5 {file_location_id=5 parent_frame_id=5}
6 {file_location_id=6 parent_frame_id=6}
7 {file_location_id=7 parent_frame_id=7}
8 {file_location_id=8 parent_frame_id=6}


ENTRY %main (x: f32[2,8]) -> f32[8,8] {
  %x = f32[2,8]{1,0} parameter(0)
  ROOT %gather = f32[8,8]{1,0} all-gather(%x), replica_groups={{0,2,4,6},{1,3,5,7}}, \
dimensions={0}, METADATA
}
"""


def operation(metadata: str, gather: str = "") -> Operation:
    text = TEXT.replace("PACKAGE", str(PACKAGE)).replace("METADATA", metadata)
    if gather:
        start = text.index("  ROOT %gather")
        text = text[:start] + gather + "\n}\n"
    (found,) = read_operations(parse(text), text, SIZES)
    return found


@pytest.mark.parametrize(
    ("frame", "line"),
    [
        (1, "/elsewhere/train.py:10"),
        (3, f"{PACKAGE}/gradients.py:30"),
        (4, "/elsewhere/model.py:40"),
        (5, "/elsewhere/model.py:40"),
        (7, "/elsewhere/model.py:40"),
        (8, f"{PACKAGE}/models/layers.py:80"),
    ],
)
def test_line_is_the_innermost_of_the_model_inside_the_engine(
    frame, line, monkeypatch, tmp_path
):
    """Or the step's own, where no model asked; never who compiled it."""
    monkeypatch.chdir(tmp_path)
    found = operation(f'metadata={{op_name="jit(f)/dot" stack_frame_id={frame}}}')
    assert (found.name, found.line) == ("jit(f)/dot", line)


def test_path_inside_the_working_folder_is_told_from_there(monkeypatch):
    monkeypatch.chdir(PACKAGE.parent)
    found = operation("metadata={stack_frame_id=8}")
    assert found.line == "jaxpar/models/layers.py:80"


def test_stacks_are_read_to_their_end():
    text = TEXT.replace("PACKAGE", "p")
    files = [frame.file for frame in read_stacks(text)[7]]
    assert files[0] == "p/sharding/constrain.py"
    assert files[-1] == "/elsewhere/train.py"
    assert len(files) == 7
    assert read_stacks(text)[1] == (Frame("/elsewhere/train.py", 10),)
    assert read_stacks("ENTRY %main () -> f32[] {\n}\n") == {}


def test_line_beside_the_operation_is_read_too():
    found = operation(
        'metadata={op_name="f" source_file="/x/y.py" source_end_line=9 source_line=7}'
    )
    assert (found.name, found.line) == ("f", "/x/y.py:7")


def test_operation_of_the_compilers_own_has_neither_name_nor_line():
    found = operation("channel_id=1")
    assert (found.name, found.line) == ("", "")
    assert str(found) == (
        "256 bytes: 1 x all-gather of f32[8,8], an operation without a name"
    )


def test_long_name_keeps_its_end():
    text = str(operation(f'metadata={{op_name="{"s/" * 60}dot" stack_frame_id=4}}'))
    assert "f32[8,8], .../s/s/" in text
    assert text.endswith("/s/dot at /elsewhere/model.py:40")
    assert len(text) < 200


GROUPS = "replica_groups={{0,2,4,6},{1,3,5,7}}"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "%g = ((f32[2,8]{1,0}), f32[8,8]{1,0}) all-gather-start(%x), " + GROUPS,
            ("all-gather", "f32[8,8]", 1, 256),
        ),
        (
            "%g = (f32[8,8]{1,0}, f32[8,8]{1,0}) all-gather(%x, %x), " + GROUPS,
            ("all-gather", "f32[8,8]", 2, 512),
        ),
        (
            "%g = ((f32[2,8]{1,0}), f32[2,2]{1,0}) reduce-scatter-start(%x), " + GROUPS,
            ("reduce-scatter", "f32[2,8]", 1, 64),
        ),
        (
            "%g = f32[2,8]{1,0} collective-permute(%x), source_target_pairs={{0,2}}",
            ("collective-permute", "f32[2,8]", 1, 64),
        ),
    ],
)
def test_array_is_told_whole_however_the_collective_is_written(line, told):
    found = operation("", gather=f"  ROOT {line}")
    assert (found.kind, found.shape, found.num_arrays, found.bytes) == told
    assert found.axes == ("data",)


def test_operation_in_a_loop_counts_as_often_as_the_loop_runs():
    text = looped(end=9, groups="{{0,2,4,6},{1,3,5,7}}")
    (found,) = read_operations(parse(text), text, SIZES)
    assert (found.kind, found.times, found.bytes) == ("all-reduce", 4, 4 * 32)
    never = looped(end=1)
    assert read_operations(parse(never), never, SIZES) == ()


ASYNCHRONOUS = """\
%fused_computation.1 (x.1: f32[2,8]) -> f32[8,8] {
  %x.1 = f32[2,8]{1,0} parameter(0)
  ROOT %g.1 = f32[8,8]{1,0} all-gather(%x.1), channel_id=5, GROUPS
}

%async_collective_fusion.2 (x.2: f32[2,8]) -> f32[8,8] {
  %x.2 = f32[2,8]{1,0} parameter(0)
  ROOT %g.2 = f32[8,8]{1,0} all-gather(%x.2), channel_id=5, GROUPS
}

%fused_computation.3 (x.3: f32[2,8]) -> f32[8,8] {
  %x.3 = f32[2,8]{1,0} parameter(0)
  ROOT %g.3 = f32[8,8]{1,0} all-gather(%x.3), channel_id=5, GROUPS
}

ENTRY %main (x: f32[2,8]) -> f32[8,8] {
  %x = f32[2,8]{1,0} parameter(0)
  %async-collective-start = f32[8,8]{1,0} fusion(%x), calls=%fused_computation.1
  %fusion.2 = f32[8,8]{1,0} fusion(%x), calls=%async_collective_fusion.2
  ROOT %async-collective-done = f32[8,8]{1,0} fusion(%x), calls=%fused_computation.3
}
"""


def test_exchange_that_a_tpu_runs_beside_other_work_is_counted_where_it_starts():
    text = ASYNCHRONOUS.replace("GROUPS", GROUPS)
    (found,) = read_operations(parse(text), text, SIZES)
    assert (found.times, found.bytes) == (1, 256)


def compiled_sum(number: int) -> tuple[Operation, ...]:
    """A program that sums at one of two lines, and is else the same."""
    mesh = make_mesh(data=8)

    def first(x):
        return x.sum(0)

    def second(x):
        return x.sum(0)

    def f(x):
        return (first, second)[number](x)

    place = NamedSharding(mesh, P("data"))
    rows = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=place)
    with operations.todays_lines():
        text = jax.jit(f).lower(rows).compile().as_text()
    return read_operations(parse(text), text, dict(mesh.shape))


def test_lines_are_those_of_the_source_and_not_of_a_cached_program():
    source, start = inspect.getsourcelines(compiled_sum)
    lines = [start + i for i, text in enumerate(source) if "x.sum(0)" in text]
    for number, line in enumerate(lines):
        (found,) = compiled_sum(number)
        assert found.line.endswith(f"tests/compiled/test_source_lines.py:{line}")
        assert (found.kind, found.shape) == ("all-reduce", "f32[4]")


def test_setting_of_the_cache_is_put_back():
    name = "jax_compilation_cache_include_metadata_in_key"
    inside = []

    def compile_badly():
        with operations.todays_lines():
            inside.append(getattr(jax.config, name))
            raise KeyError

    with pytest.raises(KeyError):
        compile_badly()
    assert inside == [True]
    assert not getattr(jax.config, name)
