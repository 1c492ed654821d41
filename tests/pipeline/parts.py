"""The pipeline's functions of the toy model, without an engine, and its plain loss."""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.pipeline.sections import Sections
from jaxpar.pipeline.stage_functions import SectionFunctions, StageFunctions
from jaxpar.pipeline.stages import Division, Stages
from jaxpar.step.inputs import make_inputs
from jaxpar.step.loss import as_losses
from jaxpar.step.row_draws import AsTraced, ShardKey
from jaxpar.tree import named_leaves
from tests.model.toys import (
    BATCHES,
    HIDDEN,
    VOCAB,
    WIDTH,
    cross_entropy,
    loss_fn,
    make_model,
    plain_logits,
)

ACCUMULATE = 2
INPUTS = make_inputs(jax.tree.map(jnp.asarray, BATCHES[0]), jnp.int32(0))
KEY = ShardKey(jax.random.key(0), jnp.int32(0))
FIRST = jnp.int32(0)


def make_network(num_blocks: int = 3, **change: Any) -> Any:
    return make_model(num_blocks=num_blocks, **change).make_network(loss_fn, BATCHES[0])


def make_functions(num_blocks: int = 3, **change: Any) -> StageFunctions:
    return functions_of(make_network(num_blocks, **change))


def functions_of(
    network: Any, loss: Any = loss_fn, frozen: Collection[str] = ()
) -> StageFunctions:
    params, _ = jax.eval_shape(network.init, KEY.key)
    return StageFunctions(
        network,
        as_losses(loss, None)[0],
        ACCUMULATE,
        training=True,
        platform="cpu",
        draws=AsTraced(),
        trained=frozenset(named_leaves(params)) - frozenset(frozen),
    )


def cut(num_blocks: int = 3, stages: int = 1, chunks: int = 1) -> Division:
    """The toy model's one section, divided."""
    return Division((Stages(num_blocks, stages, chunks),))


def make_sections(
    division: Division,
    *,
    keeps: bool = False,
    splits: bool = False,
    frozen: Collection[str] = (),
    **change: Any,
) -> Sections:
    network = make_network(division.sections[0].num_blocks, **change)
    functions = functions_of(network, frozen=frozen)
    return Sections(functions, division, keeps=keeps, splits=splits)


def make_block_functions(division: Division, **change: Any) -> SectionFunctions:
    """The blocks of the toy model's one section."""
    (chunks,) = make_sections(division, **change).chunks
    return chunks.functions


def make_params(num_blocks: int) -> dict[str, Any]:
    """Parameters of the toy model, in NumPy; no bias is zero."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return 0.4 * rng.standard_normal(shape, np.float32)

    up, down = (num_blocks, WIDTH, HIDDEN), (num_blocks, HIDDEN, WIDTH)
    return {
        "embed": {"table": normal(VOCAB, WIDTH)},
        "blocks": {
            "up": {"kernel": normal(*up), "bias": normal(num_blocks, HIDDEN)},
            "down": {"kernel": normal(*down), "bias": normal(num_blocks, WIDTH)},
        },
        "head": {"table": normal(VOCAB, WIDTH)},
    }


PARAMS = make_params(3)


def microbatch(index: int) -> dict[str, jax.Array]:
    """Rows m, m + M and so on, as the documentation has it."""
    return {name: jnp.asarray(x[index::ACCUMULATE]) for name, x in BATCHES[0].items()}


def plain_block(block: Any, hidden: jax.Array) -> jax.Array:
    """One block of the toy model, by hand."""
    up, down = block["up"], block["down"]
    inner = jnp.tanh(hidden @ up["kernel"] + up["bias"])
    return hidden + inner @ down["kernel"] + down["bias"]


def plain_total(params: Any) -> jax.Array:
    """The sum over micro-batches of loss times weight."""
    total = jnp.float32(0)
    for index in range(ACCUMULATE):
        rows = microbatch(index)
        logits = plain_logits(params, rows["tokens"])
        total += cross_entropy(logits, rows["targets"]) * len(rows["tokens"])
    return total
