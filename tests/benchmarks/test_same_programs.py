"""Does the comparer of programs see a change of a program, and nothing else?"""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from benchmarks.same_programs import comparable


@pytest.fixture(scope="module")
def program() -> str:
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(data=8))
    sharded = NamedSharding(mesh, P("data"))

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    structs = (
        jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=NamedSharding(mesh, P())),
        jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=sharded),
    )
    text = jax.jit(jax.grad(loss)).lower(*structs).compile().as_text()
    assert text is not None
    return text


def renamed(text: str) -> str:
    """The program with other names of everything that may have others."""
    text = text.replace("jit_loss", "jit_another").replace("/jit(loss)", "/jit(x)")
    text = re.sub(r"%([\w.-]+)", r"%renamed_\1", text)
    text = re.sub(r"stack_frame_id=(\d+)", r"stack_frame_id=1\1", text)
    return text.replace("test_same_programs.py", "elsewhere.py")


def test_names_and_source_lines_do_not_count(program: str) -> None:
    other = renamed(program)
    assert other != program
    assert comparable(other) == comparable(program)


@pytest.mark.parametrize(
    ("pattern", "change"),
    [
        (r" tanh\(", " sine("),
        (r"all-reduce\(%[\w.-]+\)", "all-reduce(%another)"),
        (r"\{1,0\}", "{0,1}"),
        (r"lhs_contracting_dims=\{\d\}", "lhs_contracting_dims={7}"),
        (r"replica_groups=.*?, (?=use)", "replica_groups={{0,1},{2,3}}, "),
        (r"f32\[16,32\]", "f32[32,16]"),
    ],
    ids=["opcode", "operand", "layout", "attribute", "replica group", "shape"],
)
def test_each_change_of_a_program_is_seen(
    program: str, pattern: str, change: str
) -> None:
    other, count = re.subn(pattern, change, program, count=1)
    assert count == 1
    assert comparable(other) != comparable(program)
