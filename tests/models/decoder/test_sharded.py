"""Has the GPT on a mesh the gradients of one device, and what does it communicate?"""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder
from jaxpar.models.layers import project_to_logits
from jaxpar.tree import named_leaves

# Sizes that no other dim has, so that a shape in the program tells what it is.
VOCAB, HEAD, LENGTH = 88, 6, 20
CONFIG = DecoderConfig(
    vocab_size=VOCAB, seq_len=LENGTH, num_layers=2, num_heads=8, width=8 * HEAD
)
LLAMA = {
    "positions": "rotary",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "num_kv_heads": 4,
    "tied_embedding": False,
    "sequence_parallel": True,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence": {"sequence_parallel": True},
    "llama": LLAMA,
}
SPLIT = {"vocab", "heads", "kv_heads", "mlp"}
TOKENS = np.random.default_rng(0).integers(0, VOCAB, size=(4, LENGTH + 1))


def four_devices() -> Mesh:
    return make_mesh(MeshShape(data=2, tensor=2), jax.devices()[:4])


def make_program(name: str) -> tuple[Any, list[jax.Array], list[NamedSharding]]:
    """Return loss and gradients as a function of flat leaves, leaves and shardings."""
    model = make_decoder(dataclasses.replace(CONFIG, **OPTIONS[name]))
    network = model.make_network(decoder_loss, {"tokens": TOKENS})
    key = jax.random.key(0)
    params, _ = jax.jit(network.init)(key)
    names = network.dim_names()
    specs = [
        P(*("tensor" if n in SPLIT else None for n in names[path] or ()))
        for path in named_leaves(params)
    ]
    leaves, treedef = jax.tree.flatten(params)

    def mean_loss(leaves: list[jax.Array], tokens: jax.Array) -> jax.Array:
        variables, batch = (jax.tree.unflatten(treedef, leaves), {}), {"tokens": tokens}
        loss, _ = network.run(decoder_loss, variables, key, batch, training=True)
        return loss.total / loss.weight

    shardings = [NamedSharding(four_devices(), spec) for spec in specs]
    return jax.value_and_grad(mean_loss), leaves, shardings


@functools.cache
def compile_sharded(name: str) -> tuple[Any, list[jax.Array], jax.Array]:
    """Return the compiled program and its arguments, placed."""
    program, leaves, shardings = make_program(name)
    leaves = jax.device_put(leaves, shardings)
    tokens = jax.device_put(TOKENS, NamedSharding(four_devices(), P("data")))
    with jax.set_mesh(four_devices()):
        jitted = jax.jit(program, out_shardings=(None, shardings))
        return jitted.lower(leaves, tokens).compile(), leaves, tokens


def collectives(text: str) -> list[tuple[str, list[int]]]:
    """Return each array that a compiled program communicates, with its dims."""
    pattern = r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\("
    found = re.findall(pattern, text)
    return [
        (kind, [int(dim) for dim in shape.split(",") if dim])
        for result, kind in found
        for shape in re.findall(r"\[([\d,]*)\]", result)
    ]


@pytest.mark.parametrize("name", OPTIONS)
def test_gpt_sharded_has_the_gradients_of_one_device(name: str):
    program, leaves, _ = make_program(name)
    want_loss, want = jax.jit(program)(leaves, TOKENS)
    compiled, leaves, tokens = compile_sharded(name)
    loss, grads = compiled(leaves, tokens)
    assert float(loss) == pytest.approx(float(want_loss), rel=1e-6)
    for grad, expected in zip(grads, want, strict=True):
        error = np.linalg.norm(np.asarray(grad) - np.asarray(expected))
        assert error < 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("name", OPTIONS)
def test_gpt_sharded_moves_no_heads_and_no_logits(name: str):
    compiled, _, _ = compile_sharded(name)
    found = collectives(compiled.as_text())
    kinds = {kind for kind, _ in found}
    assert "all-reduce" in kinds
    assert "all-to-all" not in kinds
    # Heads of a parameter's gradient are reduced over data; those of tokens stay.
    lengths = {LENGTH, LENGTH // 2}
    heads = [dims for _, dims in found if HEAD in dims and lengths & {*dims}]
    assert not heads
    assert not [dims for _, dims in found if VOCAB in dims]
    gathered = [dims for kind, dims in found if kind == "all-gather"]
    assert all(LENGTH in dims for dims in gathered)
    sequence_parallel = OPTIONS[name].get("sequence_parallel", False)
    assert bool(gathered) == sequence_parallel
    # With rows and tokens in one dim, a GPU's compiler would find no reduce-scatter in
    # a reduction and a slice of tokens.
    merged = [dims for _, dims in found if 2 * LENGTH in dims]
    assert bool(merged) != sequence_parallel


def test_gpt_gathers_tokens_where_it_says_so():
    # Left to the compiler, it is done before the norm's last product, in fp32.
    text = compile_sharded("llama")[0].as_text()
    lines = [line for line in text.splitlines() if " all-gather(" in line]
    places = re.findall(r'op_name="([^"]*)"', "\n".join(lines))
    assert any(place.endswith("sharding_constraint") for place in places)
    assert not [place for place in places if place.endswith("mul")]


def test_logits_lie_over_the_vocabulary_whatever_the_kernel_does():
    with jax.set_mesh(four_devices()):
        logits = jax.jit(project_to_logits)(jnp.ones((2, 4, 8)), jnp.ones((8, 6)))
    assert logits.sharding.spec == P("data", None, "tensor")


def test_gpt_takes_a_batch_that_the_data_axis_does_not_divide():
    config = dataclasses.replace(CONFIG, sequence_parallel=True)
    tokens = jnp.asarray(TOKENS[:1, :7])
    model = make_decoder(config).init(0, tokens)
    want = jax.jit(lambda model: model(tokens))(model)
    with jax.set_mesh(four_devices()):
        got = jax.jit(lambda model: model(tokens))(model)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
