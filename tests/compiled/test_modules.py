"""Do instructions belong to the modules in whose scopes they were traced?"""

import pytest

from jaxpar.compiled.hlo import parse
from jaxpar.compiled.modules import (
    COLLECTIVES,
    LOSS,
    OTHER,
    UPDATE,
    attributions_of,
    inclusive,
    is_collective_kernel,
    make_tree,
)

TREE = make_tree(
    {
        "embed/table": (10, 4),
        "blocks/mlp/up/kernel": (3, 4, 8),
        "blocks/norm/scale": (3, 4),
        "encoder/layers/0/kernel": (4, 4),
        "encoder/layers/1/kernel": (4, 4),
        "scale": (1,),
    },
    {"blocks": 3},
    "update",
)


@pytest.mark.parametrize(
    ("op_name", "path"),
    [
        ("jit(flat_step)/jvp(embed)/gather", ("embed",)),
        (
            "f/transpose(jvp(jvp()))/checkpoint/while/body/blocks/mlp/up/dot_general",
            ("blocks", "mlp", "up"),
        ),
        # A scope of somebody else's between, and one that is met again.
        ("jit(f)/blocks/mine/mlp/blocks/mlp/checkpoint/add", ("blocks", "mlp")),
        ("jit(f)/jvp(Model)/encoder.encode/layers/1/dot", ("encoder", "layers", "*")),
        # The last part is a primitive, not the module of the same name.
        ("jit(f)/jvp()/blocks/norm", ("blocks",)),
        ("jit(f)/update/jit(_where)/select_n", UPDATE),
        ("jit(f)/shard_map/jvp()/reduce_sum", LOSS),
        ("jit(f)/shard_map/psum", OTHER),
        ("", OTHER),
    ],
)
def test_operation_belongs_to_the_innermost_module_of_its_scopes(op_name, path):
    assert TREE.find(op_name) == path


def test_rows_count_modules_and_own_parameters():
    assert TREE.counts == {
        ("embed",): 1,
        ("blocks",): 3,
        ("blocks", "mlp"): 3,
        ("blocks", "mlp", "up"): 3,
        ("blocks", "norm"): 3,
        ("encoder",): 1,
        ("encoder", "layers"): 1,
        ("encoder", "layers", "*"): 2,
    }
    assert TREE.parameters == {
        ("embed",): 40,
        ("blocks", "mlp", "up"): 96,
        ("blocks", "norm"): 12,
        ("encoder", "layers", "*"): 32,
    }


def test_layers_of_other_shapes_are_rows_of_their_own():
    shapes = {f"Dense_{i}/kernel": (4, 4) for i in range(3)}
    tree = make_tree(shapes | {"Dense_3/kernel": (4, 1)}, {}, "update")
    assert tree.counts == {("Dense_0",): 3, ("Dense_3",): 1}
    assert tree.find("jit(f)/Dense_2/dot_general") == ("Dense_0",)


def test_stacked_sections_of_equal_layers_count_all_their_blocks():
    shapes = {f"blocks_{n}/up/kernel": (4, 4) for n in range(2)}
    tree = make_tree(shapes, {"blocks_0": 3, "blocks_1": 5}, "update")
    assert tree.counts == {("blocks_*",): 8, ("blocks_*", "up"): 8}


def test_inclusive_adds_what_is_below():
    assert inclusive({("a",): 1, ("a", "b"): 2, ("c", "d"): 4}) == {
        ("a",): 3,
        ("a", "b"): 2,
        ("c",): 4,
        ("c", "d"): 4,
    }


PROGRAM = """
FileNames
1 "model.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=4 end_column=5}

StackFrames
1 {file_location_id=1 parent_frame_id=1}


%fused (p0: f32[4]) -> f32[4] {
  %p0 = f32[4]{0} parameter(0)
  %tanh = f32[4]{0} tanh(%p0), metadata={op_name="jit(f)/jvp(blocks)/norm/tanh"}
  ROOT %neg = f32[4]{0} negate(%tanh)
}

%reducing (p0: f32[4]) -> f32[4] {
  %p0 = f32[4]{0} parameter(0)
  ROOT %inner = f32[4]{0} all-reduce(%p0), replica_groups={{0,1}}, to_apply=%sum
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %fusion = f32[4]{0} fusion(%x), kind=kLoop, calls=%fused
  %gathered = f32[4]{0} all-gather-start(%fusion), metadata={op_name="f/embed/x"}
  %wrapped = f32[4]{0} async-start(%gathered), calls=%reducing
  %called = f32[4]{0} call(%wrapped), to_apply=%fused
  ROOT %norm = f32[4] sqrt(%called), metadata={op_name="jvp()/sqrt" stack_frame_id=1}
}
"""


def test_instructions_are_placed_by_their_own_name_or_by_what_they_fuse():
    attributions = attributions_of(parse(PROGRAM), PROGRAM, TREE)
    assert attributions["fusion"].path == ("blocks", "norm")
    assert attributions["gathered"].path == ("embed",)
    found = {
        name for name, attribution in attributions.items() if attribution.communicates
    }
    assert found == {"gathered", "wrapped", "inner"}
    assert [
        name for name, attribution in attributions.items() if attribution.is_control
    ] == ["called"]
    assert attributions["wrapped"].path == COLLECTIVES
    assert attributions["norm"].path == LOSS
    assert attributions["norm"].source == "jvp()/sqrt at model.py:12"
    assert attributions["fusion"].source == ""


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("ncclDevKernel_AllGather_RING_LL", True),
        ("all-reduce.5", True),
        ("MemcpyD2D", False),
        ("loop_fusion", False),
    ],
)
def test_collective_kernels_are_known_by_name(name, is_one):
    assert is_collective_kernel(name) == is_one
