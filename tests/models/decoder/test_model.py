"""Does the GPT compute what NumPy does, whatever its config and its program are?"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.model.network import WholeModel
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder
from jaxpar.tree import named_leaves

SMALL = DecoderConfig(vocab_size=17, seq_len=6, num_layers=3, num_heads=4, width=16)
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {
        "norm": "rmsnorm",
        "positions": "rotary",
        "activation": "swiglu",
        "bias": False,
        "tied_embedding": False,
        "num_kv_heads": 2,
    },
    "multi-query": {"num_kv_heads": 1, "activation": "swiglu", "mlp_width": 24},
    "rotary-layernorm": {"positions": "rotary", "bias": False, "num_kv_heads": 2},
    "rotary-base": {"positions": "rotary", "rotary_base": 50.0},
    "untied": {"tied_embedding": False, "norm": "rmsnorm"},
}
TOKENS = np.random.default_rng(0).integers(0, 17, size=(2, 6))
MakeGPT = Callable[[DecoderConfig], WholeModel]


def tree_of(model: WholeModel) -> dict[str, Any]:
    """Return the parameters as nested dicts of fp64 arrays."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64), model.params)


def product(x: np.ndarray, layer: dict[str, np.ndarray]) -> np.ndarray:
    return x @ layer["kernel"] + layer.get("bias", 0)


def normalise(x: np.ndarray, layer: dict[str, np.ndarray], kind: str) -> np.ndarray:
    if kind == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    return x * layer["scale"] + layer.get("bias", 0)


def turn(x_TNH: np.ndarray, positions_T: np.ndarray, base: float) -> np.ndarray:
    half = x_TNH.shape[-1] // 2
    angle = positions_T[:, None] * base ** (-np.arange(half) / half)
    pairs = x_TNH[..., :half] + 1j * x_TNH[..., half:]
    pairs = pairs * np.exp(1j * angle)[:, None]
    return np.concatenate([pairs.real, pairs.imag], -1)


def attention(
    x_TD: np.ndarray,
    layer: dict[str, Any],
    config: DecoderConfig,
    segments_T: np.ndarray,
) -> np.ndarray:
    length, heads = len(x_TD), config.num_heads
    split = {
        name: product(x_TD, layer[name]).reshape(length, -1, config.head_size)
        for name in ("query", "key", "value")
    }
    if config.positions == "rotary":
        positions = np.arange(length)
        base = config.rotary_base
        split["query"] = turn(split["query"], positions, base)
        split["key"] = turn(split["key"], positions, base)
    out = np.zeros((length, heads, config.head_size))
    for t, n in np.ndindex(length, heads):
        seen = [s for s in range(t + 1) if segments_T[s] == segments_T[t]]
        kv_head = n * config.kv_heads // heads
        scores = split["key"][seen, kv_head] @ split["query"][t, n]
        weights = np.exp(scores / np.sqrt(config.head_size))
        out[t, n] = weights / weights.sum() @ split["value"][seen, kv_head]
    return product(out.reshape(length, -1), layer["output"])


def mlp(x: np.ndarray, layer: dict[str, Any], config: DecoderConfig) -> np.ndarray:
    up = product(x, layer["up"])
    if config.activation == "gelu":
        inner = np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)
        return product(0.5 * up * (1 + np.tanh(inner)), layer["down"])
    gate = product(x, layer["gate"])
    return product(gate / (1 + np.exp(-gate)) * up, layer["down"])


def reference_logits(
    params: dict[str, Any],
    config: DecoderConfig,
    tokens_BT: np.ndarray,
    segments_BT: np.ndarray | None = None,
) -> np.ndarray:
    """Compute a GPT in fp64 NumPy, row by row, layer by layer, query by query."""
    if segments_BT is None:
        segments_BT = np.zeros_like(tokens_BT)
    embed, head = params["embed"], params["head"]
    table = embed["embedding"]["table"]
    kernel = table.T if config.tied_embedding else head["logits"]["kernel"]
    rows = []
    for tokens, segments in zip(tokens_BT, segments_BT, strict=True):
        x = table[tokens]
        if config.positions == "learned":
            x = x + embed["positions"]["table"][: len(tokens)]
        for i in range(config.num_layers):
            block = jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"])
            y = normalise(x, block["attention_norm"], config.norm)
            x = x + attention(y, block["attention"], config, segments)
            y = normalise(x, block["mlp_norm"], config.norm)
            x = x + mlp(y, block["mlp"], config)
        rows.append(normalise(x, head["final_norm"], config.norm) @ kernel)
    return np.stack(rows)


@jax.jit
def call(model: WholeModel, tokens: jax.Array, inputs: dict) -> jax.Array:
    return model(tokens, **inputs)


def run(model: WholeModel, tokens: np.ndarray, **inputs: np.ndarray) -> np.ndarray:
    """Call a model under jit, with NumPy arrays."""
    return np.asarray(call(model, tokens, inputs))


@jax.jit
def loss_and_grads(model: WholeModel, tokens: jax.Array) -> tuple[jax.Array, dict]:
    """Return the mean loss and the gradients of the parameters."""

    def mean_loss(params: dict) -> jax.Array:
        loss = decoder_loss(model.with_params(params), {"tokens": tokens})
        return loss.total / loss.weight

    return jax.value_and_grad(mean_loss)(model.params)


def assert_trees_close(got: Any, want: Any, tolerance: float) -> None:
    """Compare leaf by leaf, relative to the size of the whole leaf."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for path, leaf in jax.tree_util.tree_leaves_with_path(got):
        expected = want
        for entry in path:
            expected = expected[entry.key]
        error = np.linalg.norm(leaf - expected) / np.linalg.norm(expected)
        assert error < tolerance, f"{jax.tree_util.keystr(path)}: {error}"


def with_config(model: WholeModel, config: DecoderConfig) -> WholeModel:
    """The same weights under another config of the same shape."""
    return make_decoder(config).init(1, TOKENS).with_params(model.params)


@pytest.mark.parametrize("name", VARIANTS)
def test_gpt_equals_the_numpy_reference(name: str, make_random_gpt: MakeGPT):
    config = dataclasses.replace(SMALL, **VARIANTS[name])
    model = make_random_gpt(config)
    want = reference_logits(tree_of(model), config, TOKENS)
    got = run(model, TOKENS)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_gpt_segments_do_not_see_each_other(make_random_gpt: MakeGPT):
    model = make_random_gpt(SMALL)
    segments = np.array([[0, 0, 1, 1, 1, 2], [5, 5, 5, 5, 0, 0]])
    want = reference_logits(tree_of(model), SMALL, TOKENS, segments)
    got = run(model, TOKENS, segment_ids_BT=segments)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_gpt_packed_rows_equal_their_documents(
    positions: str, make_random_gpt: MakeGPT
):
    model = make_random_gpt(dataclasses.replace(SMALL, positions=positions))
    packed = run(
        model,
        TOKENS,
        positions_BT=np.array([[0, 1, 0, 1, 2, 3]] * 2),
        segment_ids_BT=np.array([[0, 0, 1, 1, 1, 1]] * 2),
    )
    alone = [run(model, TOKENS[:, :2]), run(model, TOKENS[:, 2:])]
    np.testing.assert_allclose(packed, np.concatenate(alone, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_gpt_is_causal(name: str, make_random_gpt: MakeGPT):
    model = make_random_gpt(dataclasses.replace(SMALL, **VARIANTS[name]))
    before = run(model, TOKENS)
    for t in range(1, TOKENS.shape[1]):
        changed = TOKENS.copy()
        changed[:, t] = (changed[:, t] + 1) % 17
        after = run(model, changed)
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert not np.allclose(after[:, t], before[:, t], atol=1e-3)


def test_gpt_with_rotary_positions_may_be_longer(make_random_gpt: MakeGPT):
    model = make_random_gpt(dataclasses.replace(SMALL, positions="rotary"))
    assert run(model, np.zeros((1, 9), int)).shape == (1, 9, 17)


def test_gpt_parameters_are_stacked_and_named():
    config = dataclasses.replace(SMALL, **VARIANTS["llama"])
    network = make_decoder(config).make_network(lambda model, x: model(x), TOKENS)
    names = network.dim_names()
    assert names == {
        "embed/embedding/table": ("vocab", "embed"),
        "blocks/attention_norm/scale": ("layers", "embed"),
        "blocks/attention/query/kernel": ("layers", "embed", "heads"),
        "blocks/attention/key/kernel": ("layers", "embed", "kv_heads"),
        "blocks/attention/value/kernel": ("layers", "embed", "kv_heads"),
        "blocks/attention/output/kernel": ("layers", "heads", "embed"),
        "blocks/mlp_norm/scale": ("layers", "embed"),
        "blocks/mlp/gate/kernel": ("layers", "embed", "mlp"),
        "blocks/mlp/up/kernel": ("layers", "embed", "mlp"),
        "blocks/mlp/down/kernel": ("layers", "mlp", "embed"),
        "head/final_norm/scale": ("embed",),
        "head/logits/kernel": ("embed", "vocab"),
    }
    leaves = named_leaves(make_decoder(config).init(0, TOKENS).params)
    assert leaves.keys() == names.keys()
    for path, leaf in leaves.items():
        assert len(names[path]) == leaf.ndim
        assert not path.startswith("blocks/") or leaf.shape[0] == SMALL.num_layers


def test_gpt_layers_start_different():
    blocks = make_decoder(SMALL).init(0, TOKENS).params["blocks"]
    kernel = blocks["mlp"]["up"]["kernel"]
    assert not jnp.allclose(kernel[0], kernel[1])


def test_gpt_residual_products_start_smaller():
    config = DecoderConfig(num_layers=8, num_heads=4, width=64)
    blocks = make_decoder(config).init(0, TOKENS).params["blocks"]
    attention, mlp = blocks["attention"], blocks["mlp"]
    for layer in (attention["output"], mlp["down"]):
        assert float(layer["kernel"].std()) == pytest.approx(0.02 / 4, rel=0.05)
    for layer in (attention["query"], mlp["up"]):
        assert float(layer["kernel"].std()) == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_gpt_every_parameter_of_every_layer_has_a_gradient(
    name: str, make_random_gpt: MakeGPT
):
    model = make_random_gpt(dataclasses.replace(SMALL, **VARIANTS[name]))
    tokens = np.random.default_rng(1).integers(0, 17, size=(8, 7))
    _, grads = loss_and_grads(model, tokens)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        slices = grad if path[0].key == "blocks" else grad[None]
        for layer in slices:
            # A gradient that is only rounding noise is about 1e-8 here.
            assert jnp.abs(layer).min() < jnp.abs(layer).max(), path
            assert jnp.linalg.norm(layer) > 1e-5, path


@pytest.mark.parametrize(
    "fields",
    [
        {"unroll": 2},
        {"unroll": 3},
        {"remat": "full"},
        {"remat": "dots"},
        {"remat": "save-names", "remat_names": ("qkv", "mlp_hidden")},
        {"remat": "full", "unroll": 3},
        {"sequence_parallel": True},
    ],
    ids=str,
)
def test_gpt_program_options_change_no_gradient(
    fields: dict[str, Any], make_random_gpt: MakeGPT
):
    model = make_random_gpt(SMALL)
    want_loss, want = loss_and_grads(model, TOKENS)
    config = dataclasses.replace(SMALL, **fields)
    loss, grads = loss_and_grads(with_config(model, config), TOKENS)
    assert float(loss) == pytest.approx(float(want_loss), rel=1e-6)
    assert_trees_close(grads, want, 1e-5)


def test_gpt_unroll_changes_the_compiled_loop():
    def num_loops(unroll: int) -> int:
        model = make_decoder(dataclasses.replace(SMALL, unroll=unroll)).init(0, TOKENS)
        program = jax.jit(lambda params: model.with_params(params)(jnp.asarray(TOKENS)))
        return program.lower(model.params).as_text().count("stablehlo.while")

    assert num_loops(1) == 1
    assert num_loops(3) == 0


@pytest.mark.parametrize(
    ("fields", "prevents"),
    [({}, False), ({"unroll": 3}, True)],
    ids=str,
)
def test_gpt_remat_is_protected_where_no_loop_does(
    fields: dict[str, Any], prevents: bool
):
    config = dataclasses.replace(SMALL, remat="dots", **fields)
    model = make_decoder(config).init(0, TOKENS)
    jaxpr = jax.make_jaxpr(lambda model: model(jnp.asarray(TOKENS)))(model)
    assert ("prevent_cse=False" in str(jaxpr)) != prevents


def test_gpt_computes_in_the_dtype_of_its_parameters(make_random_gpt: MakeGPT):
    model = make_random_gpt(SMALL)
    want = run(model, TOKENS)
    half = model.with_params(
        jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
    )
    hidden = jax.eval_shape(lambda model: model.run_blocks(jnp.asarray(TOKENS)), half)
    assert hidden.dtype == jnp.bfloat16
    got = run(half, TOKENS)
    assert got.dtype == np.float32
    # Products of bf16 numbers, three layers deep.
    assert np.linalg.norm(got - want) < 0.05 * np.linalg.norm(want)
    assert not np.array_equal(got, want)
