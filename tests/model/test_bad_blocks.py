"""Is everything that is wrong with a model in parts said before anything compiles?

Each case is one argument that is wrong in a call that is right but for it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from tests.model.toys import (
    BATCHES,
    WIDTH,
    Block,
    Head,
    RecurrentBlock,
    cross_entropy,
    loss_fn,
    make_engine,
    make_mesh,
    make_model,
    params_of,
    plain_loss,
)


class Ending(nnx.Module):
    """A block, and what is done to its output."""

    def __init__(self, rngs, end):
        self.block, self.end = Block(rngs), end

    def __call__(self, x):
        return self.end(self.block(x))


def ending(end):
    return lambda rngs: Ending(rngs, end)


class CountingQuietly(Block):
    """Parameters as the others', and state besides."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.calls = nnx.Variable(jnp.zeros(()))


class Deep(Block):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)


class Narrow(Block):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.down = nnx.Linear(WIDTH, 5, rngs=rngs)


def relu_block(rngs):
    return Block(rngs, act=nnx.relu)


def tie(embed: Any, head: Any) -> dict:
    return {"tied": (("embed", embed), ("head", head))}


PARTS = {
    "block of another width": (
        {"block": ending(lambda x: jnp.concatenate([x, x], -1))},
        r"PipelineModel: blocks: a block is given \[\(\(8, 5, 8\), 'float32'\)\] "
        r"\(shape, dtype\) and returns \[\(\(8, 5, 16\), 'float32'\)\]; a block's "
        r"output is the next one's input, so they must be alike\. Change widths and "
        r"dtypes in embed or head, or in a part between two sections\.",
    ),
    "block of another dtype": (
        {"block": ending(lambda x: x.astype(jnp.bfloat16))},
        r"is given .*'float32'\)\] .* returns \[\(\(8, 5, 8\), 'bfloat16'\)\]; a block",
    ),
    "block of another structure": (
        {"block": ending(lambda x: (x, x))},
        r"is given \[\(.*\)\] .* returns \[\(.*\), \(.*\)\]; a block's output is the",
    ),
    "block of another parameter's shape": (
        {"block": [Block, Block, Narrow]},
        r"PipelineModel: blocks: block 2 has down/bias of shape \(5,\), block 0 of "
        r"\(8,\); blocks are stacked, so their variables must be equal in name and "
        r"shape\. Move what differs to embed or head, or make it a section of its own",
    ),
    "block of a parameter more": (
        {"block": [Block, Deep, Block]},
        r"block 1 has out/bias of shape \(8,\), block 0 of None; blocks are stacked",
    ),
    "block of a parameter less": (
        {"block": [Deep, Deep, Block]},
        r"block 2 has out/bias of shape None, block 0 of \(8,\); blocks are stacked",
    ),
    "block that computes something else": (
        {"block": [Block, Block, relu_block]},
        r"PipelineModel: blocks: block 2 computes something else than block 0 with "
        r"parameters of equal shapes; all blocks run block 0's program, and only their "
        r"initialisation may differ\. Make it a section of its own\.",
    ),
    "state in a later block": (
        {"block": [Block, CountingQuietly, Block]},
        r"PipelineModel: blocks: block 1 has calls of shape \(\), block 0 of None; "
        r"blocks are stacked, so their variables must be equal",
    ),
    "tied path that the embedding lacks": (
        tie("tabel", "table"),
        r"PipelineModel: tied: embed has no parameter 'tabel'; it has table\. Did you "
        r"mean 'table'",
    ),
    "tied path that the head lacks": (
        tie("table", "kernel/tabel"),
        r"tied: head has no parameter 'kernel/tabel'; it has table\. Did you mean 'tab",
    ),
    "tied shapes": (
        {**tie("table", "kernel"), "head": lambda rngs: nnx.Linear(8, 3, rngs=rngs)},
        r"PipelineModel: tied: embed's 'table' has shape \(16, 8\), head's 'kernel' "
        r"\(8, 3\); tied parameters are one array",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PARTS)
def test_parts_that_do_not_fit_are_said_before_anything_compiles(case, compiled):
    change, message = PARTS[case]
    model = make_model(**change)
    with pytest.raises(ValueError, match=message):
        make_engine(model)
    assert compiled == []


TIED = (
    r"PipelineModel: tied=.* must pair \('embed', path\) with \('head', path\), such as"
    r" tied=\(\('embed', 'table'\), \('head', 'table'\)\)"
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_blocks": 0},
         r"PipelineModel: section 'blocks' has count 0; it must be at least 1\."),
        ({"num_blocks": -2},
         r"PipelineModel: section 'blocks' has count -2; it must be at least 1\."),
        ({"block": [Block] * 2},
         r"PipelineModel: section 'blocks' has 2 blocks, but count 3; give one block "
         r"for all, or one for each"),
        ({"unroll": 0},
         r"PipelineModel: unroll=0 must be between 1 and 3, the largest count"),
        ({"unroll": 4},
         r"PipelineModel: unroll=4 must be between 1 and 3, the largest count"),
        ({"tied": (("head", "table"), ("embed", "table"))}, TIED),
        ({"tied": (("embed", "table"), ("block", "table"))}, TIED),
        ({"tied": (("embed", "table"),)}, TIED),
        ({"tied": ("embed/table", "head/table")}, TIED),
        ({"remat": "ful"}, r"remat: policy='ful' must be .* Did you mean 'full'"),
        ({"remat": "save-names"}, r"policy='save-names' with names=\(\) would save no"),
        ({"remat_names": ("hidden",)}, r"names=\('hidden',\) must be empty under pol"),
    ],
    ids=lambda x: str(next(iter(x.items())))[:40] if isinstance(x, dict) else None,
)  # fmt: skip
def test_model_that_cannot_be_is_said_where_it_is_made(change, message):
    with pytest.raises(ValueError, match=message):
        make_model(**change)


def calling(*args: Any, **kwargs: Any):
    """A loss that calls the model with more than the tokens."""

    def loss(model, batch):
        out = model(batch["tokens"], *args, **kwargs)
        return cross_entropy(out, batch["targets"])

    return loss


def never_calling(model, batch):
    return jnp.mean(batch["tokens"] * 1.0)


def reading_after(model, batch):
    return loss_fn(model, batch) + model.head.table.sum()


def reading_before(model, batch):
    return model.num_layers * loss_fn(model, batch)


def calling_under(transform: Callable) -> Callable:
    def loss(model, batch):
        return transform(lambda batch: loss_fn(model, batch))(batch)

    return loss


def calling_twice(model, batch):
    return loss_fn(model, batch) + loss_fn(model, batch)


KEYWORD = (
    r"loss_fn: it calls the model with positoins=, which no part takes: embed takes "
    r"positions; blocks takes positions; head takes temperature\. Did you mean 'posit"
)
READS = (
    r"loss_fn: it reads model\.{}, but a PipelineModel can only be called: its parts "
    r"are on different devices\. Return the values that the loss needs from the head"
)
INPUT = (
    r"loss_fn: it calls the model with {}, but a part can only get arrays, or Python "
    r"flags, numbers and strings; make it an array, or pass it to the part's con"
)
UNDER = (
    r"loss_fn: it calls the model inside jax\.checkpoint, jax\.vmap, jax\.jit or "
    r"another transformation, but a PipelineModel is split at this call; "
    r"call it outside of them, and choose what to recompute with PipelineModel\(remat"
)
LOSSES = {
    "model not called": (
        never_calling, TypeError,
        r"loss_fn: it never called model\(\.\.\.\), so a PipelineModel has no inputs; "
        r"call the model with the batch's inputs",
    ),
    "keyword that no part takes": (calling(positoins=1), ValueError, KEYWORD),
    "keyword of Linen's apply": (
        calling(method="encode"), ValueError, r"with method=, which no part takes: emb",
    ),
    "model read before the call": (
        reading_before, ValueError, READS.format("num_layers"),
    ),
    "model read after the call": (reading_after, ValueError, READS.format("head")),
    "model called under jax.checkpoint": (
        calling_under(jax.checkpoint), ValueError, UNDER,
    ),
    "model called under jax.jit": (calling_under(jax.jit), ValueError, UNDER),
    "positional argument that is an object": (
        calling(optax.sgd), TypeError, INPUT.format("argument 1 of type function"),
    ),
    "keyword that is an object": (
        calling(positions={"at": object()}), TypeError,
        INPUT.format("positions/at of type object"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("pipe", [1, 2])
@pytest.mark.parametrize("case", LOSSES)
def test_loss_that_uses_the_model_wrongly_is_said(case, pipe, compiled):
    loss, error, message = LOSSES[case]
    with pytest.raises(error, match=message):
        make_engine(make_model(), loss_fn=loss, mesh=make_mesh(pipe=pipe))
    assert compiled == []


PIPES = {
    "model that is not in parts": (
        {"model": Head, "loss_fn": lambda model, batch: model(jnp.ones(WIDTH)).sum()},
        r"mesh: pipe=2 needs a model that can be cut into stages: give model=jaxpar\."
        r"PipelineModel\(embed=\.\.\., sections=\[\(block, count\)\], head=\.\.\.\), "
        r"or use pipe=1",
    ),
    "more stages than blocks": (
        {"pipe": 4},
        r"mesh: pipe=4 cuts a section into 4 parts, but the model has too few blocks "
        r"\(blocks: 3\); use at most pipe=3",
    ),
    "more chunks than blocks": (
        {"schedule": "interleaved"},
        r"mesh: pipe=2 x 2 chunks cuts a section into 4 parts, but the model has too "
        r"few blocks \(blocks: 3\); use at most pipe=1",
    ),
    "micro-batches that pipe does not divide": (
        {"schedule": "interleaved", "accumulate": 3, "model": make_model(num_blocks=4),
         "sample_batch": {name: x[:6] for name, x in BATCHES[0].items()}},
        r"accumulate=3: schedule='interleaved' takes micro-batches in groups of pipe=2;"
        r" use a multiple, such as 2 or 4, or schedule='1f1b', which takes any number",
    ),
    "model called twice": (
        {"loss_fn": calling_twice},
        r"loss_fn: it calls the model twice, but a pipeline runs a model once a micro-"
        r"batch; call it once, on all its inputs, or use pipe=1",
    ),
    "backward that can't be split": (
        {"schedule": "zero_bubble",
         "model": make_model(block=RecurrentBlock, num_blocks=4)},
        r"schedule='zero_bubble': only 0% of the block's backward can be deferred, "
        r"because its weight gradients are not separate matmuls .* Use '1f1b', or "
        r"pass the table to run it anyway: schedule=jaxpar\."
        r"make_schedule\('zero_bubble', 2, 2\)",
    ),
    "misspelt schedule": (
        {"schedule": "1b1f"},
        r"schedule='1b1f' must be one of .*'1f1b'.*\. Did you mean '1f1b'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PIPES)
def test_pipeline_that_cannot_be_is_said_before_anything_compiles(case, compiled):
    change, message = PIPES[case]
    call = {"model": make_model(), "pipe": 2, "accumulate": 2} | change
    mesh = make_mesh(pipe=call.pop("pipe"))
    with pytest.raises(ValueError, match=message):
        make_engine(mesh=mesh, **call)
    assert compiled == []


def test_one_stage_may_run_a_model_twice():
    engine = make_engine(make_model(), loss_fn=calling_twice)
    want = 2 * float(plain_loss(params_of(engine), BATCHES[0]))
    assert float(engine.step(BATCHES[0])["loss"]) == pytest.approx(want, rel=1e-5)
