"""Does a BERT compute what NumPy does, whatever its program is?"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.model.network import WholeModel
from jaxpar.models import BertConfig, make_bert
from jaxpar.models.bert.loss import masked_word_loss
from jaxpar.sparse_attention import LocalSlidingWindow
from jaxpar.tree import named_leaves

SMALL = BertConfig(
    vocab_size=17,
    seq_len=8,
    num_layers=3,
    num_heads=4,
    width=16,
    mlp_width=24,
    task="masked",
)
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 17, size=(2, 6))
SEGMENTS = np.array([[1, 1, 2, 2, 2, 0], [5, 5, 5, 5, 0, 0]])


@functools.cache  # What is traced for a model is kept for that very object.
def random_bert(config: BertConfig = SMALL) -> WholeModel:
    model = make_bert(config).init(0, TOKENS)
    leaves, tree = jax.tree.flatten(model.params)
    drawn = [x + 0.2 * RNG.normal(size=x.shape).astype(np.float32) for x in leaves]
    return model.with_params(jax.tree.unflatten(tree, drawn))


@jax.jit
def call(model: WholeModel, tokens: jax.Array, inputs: dict) -> jax.Array:
    return model(tokens, **inputs)


def run(model: WholeModel, tokens: np.ndarray, **inputs: np.ndarray) -> np.ndarray:
    return np.asarray(call(model, tokens, inputs))


def affine(x: np.ndarray, layer: dict[str, np.ndarray]) -> np.ndarray:
    return x @ layer["kernel"] + layer["bias"]


def normalise(x: np.ndarray, layer: dict[str, np.ndarray]) -> np.ndarray:
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-12)
    return x * layer["scale"] + layer["bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def attention(x_TD: np.ndarray, layer: dict[str, Any], seg_T: np.ndarray) -> np.ndarray:
    query, key, value = (
        affine(x_TD, layer[name]).reshape(len(x_TD), 4, -1)
        for name in ("query", "key", "value")
    )
    out = np.zeros_like(query)
    for t, n in np.ndindex(len(x_TD), 4):
        seen = seg_T == seg_T[t]
        weights = np.exp(key[seen, n] @ query[t, n] / 2)  # The root of four features.
        out[t, n] = weights / weights.sum() @ value[seen, n]
    return affine(out.reshape(len(x_TD), -1), layer["output"])


def reference(model: WholeModel, segments_BT: np.ndarray) -> np.ndarray:
    """A BERT in fp64, row by row, layer by layer, query by query."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), model.params)
    embed, head = params["embed"], params["head"]["words"]
    table = embed["embedding"]["table"]
    rows = []
    for tokens, segments in zip(TOKENS, segments_BT, strict=True):
        x = table[tokens] + embed["types"]["table"][0]
        x = normalise(x + embed["positions"]["table"][: len(tokens)], embed["norm"])
        for i in range(SMALL.num_layers):
            block = jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"])
            y = attention(x, block["attention"], segments)
            x = normalise(x + y, block["attention_norm"])
            y = affine(gelu(affine(x, block["mlp"]["up"])), block["mlp"]["down"])
            x = normalise(x + y, block["mlp_norm"])
        x = normalise(gelu(affine(x, head["dense"])), head["norm"])
        rows.append(x @ table.T + head["bias"])
    return np.stack(rows)


def test_bert_equals_the_numpy_reference():
    want = reference(random_bert(), np.zeros_like(TOKENS))
    got = run(random_bert(), TOKENS)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_segments_do_not_see_each_other():
    want = reference(random_bert(), SEGMENTS)
    got = run(random_bert(), TOKENS, segment_ids_BT=SEGMENTS)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_packed_rows_equal_their_documents():
    model = random_bert()
    packed = run(
        model,
        TOKENS,
        positions_BT=np.array([[0, 1, 0, 1, 2, 3]] * 2),
        segment_ids_BT=np.array([[1, 1, 2, 2, 2, 2]] * 2),
    )
    alone = [run(model, TOKENS[:, :2]), run(model, TOKENS[:, 2:])]
    np.testing.assert_allclose(packed, np.concatenate(alone, 1), rtol=1e-4, atol=1e-4)


def test_a_pattern_of_all_blocks_is_dense_attention():
    pattern = LocalSlidingWindow(
        num_heads=4, block=16, num_sliding_window_blocks=1, attention="bidirectional"
    )
    config = dataclasses.replace(SMALL, attention=pattern)
    sparse = make_bert(config).init(0, TOKENS).with_params(random_bert().params)
    for inputs in ({}, {"segment_ids_BT": SEGMENTS}):
        want = run(random_bert(), TOKENS, **inputs)
        np.testing.assert_allclose(run(sparse, TOKENS, **inputs), want, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "fields",
    [{"remat": "full"}, {"unroll": 3, "sequence_parallel": True}],
    ids=str,
)
def test_program_options_change_no_gradient(fields: dict[str, Any]):
    model = random_bert()
    other = make_bert(dataclasses.replace(SMALL, **fields)).init(1, TOKENS)
    batch = {"tokens": jnp.asarray(TOKENS), "labels": jnp.asarray(TOKENS[:, ::-1])}

    def grads_of(model: WholeModel) -> Any:
        def total(params: Any) -> jax.Array:
            return masked_word_loss(model.with_params(params), batch).total

        return jax.jit(jax.grad(total))(random_bert().params)

    want, got = grads_of(model), grads_of(other)
    for path, leaf in named_leaves(got).items():
        right = named_leaves(want)[path]
        error = np.linalg.norm(leaf - right)
        # A key's bias has no gradient but rounding noise.
        assert error < 1e-5 * np.linalg.norm(right) + 1e-5, path


def test_parameters_are_stacked_and_named():
    config = dataclasses.replace(SMALL, task="pretraining")
    network = make_bert(config).make_network(lambda model, x: model(x), TOKENS)
    block = {
        "attention_norm": ("embed",),
        "mlp_norm": ("embed",),
        "attention/query": ("embed", "heads"),
        "attention/key": ("embed", "kv_heads"),
        "attention/value": ("embed", "kv_heads"),
        "attention/output": ("heads", "embed"),
        "mlp/up": ("embed", "mlp"),
        "mlp/down": ("mlp", "embed"),
    }
    ends = {
        "embed/norm": ("embed",),
        "head/pooler/dense": ("embed", None),
        "head/words/dense": ("embed", None),
        "head/words/norm": ("embed",),
        "head/sentence": ("embed", None),
    }
    tables = {
        "embed/embedding/table": ("vocab", "embed"),
        "embed/positions/table": (None, "embed"),
        "embed/types/table": (None, "embed"),
        "head/words/bias": ("vocab",),
    }
    layers = {f"blocks/{path}": ("layers", *own) for path, own in block.items()}
    wanted = dict(tables)
    for path, own in (layers | ends).items():
        first = "scale" if path.endswith("norm") else "kernel"
        bias = own if first == "scale" else (*own[:-2], own[-1])
        wanted |= {f"{path}/{first}": own, f"{path}/bias": bias}
    assert network.dim_names() == wanted
