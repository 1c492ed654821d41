"""Does an evaluation by a schedule's forwards give what one stage does?

To 1e-6 relative of one stage, in which a batch is one sum; and of the plain model
(`tests.model.toys`) to 1e-5. Batches have other numbers of rows than the training
batch, so that they are cut into fewer micro-batches than a step, down to one.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from tests.model.toys import (
    LENGTH,
    TIE,
    VOCAB,
    Block,
    make_engine,
    make_mesh,
    make_model,
    params_of,
    plain_logits,
)

ACCUMULATE, TRAINED_ROWS, ROWS = 4, 8, (2, 6, 24)
CASES = {
    "1f1b": {"mesh": {"data": 2, "pipe": 2}, "zero": 3},
    "1f1b, blocks that do not divide": {"mesh": {"pipe": 2}, "num_blocks": 5},
    "interleaved": {"mesh": {"pipe": 2, "tensor": 2}, "schedule": "interleaved"},
    "interleaved over data": {
        "mesh": {"data": 2, "pipe": 2},
        "schedule": "interleaved",
        "zero": 0,
    },
}


class Dropping(Block):
    """Drops in training alone."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, *, positions=None):
        return self.drop(super().__call__(x, positions=positions))


def make_batch(rows: int) -> dict[str, np.ndarray]:
    """Targets weigh differently on every row, data shard and micro-batch."""
    rng = np.random.default_rng(rows)
    tokens = rng.integers(0, VOCAB, (2, rows, LENGTH), dtype=np.int32)
    kept = np.linspace(0.95, 0.3, rows)[:, None]
    mask = (rng.random((rows, LENGTH)) < kept).astype(np.float32)
    return {"tokens": tokens[0], "targets": tokens[1], "mask": mask}


def weighted(logits: jax.Array, batch: dict) -> tuple:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    is_right = logits.argmax(-1) == batch["targets"]
    return (losses * batch["mask"]).sum(), batch["mask"].sum(), is_right.mean()


def eval_fn(model, batch):
    total, weight, right = weighted(model(batch["tokens"]), batch)
    return jaxpar.Weighted(total, weight), {"right": right}


def loss_fn(model, batch):
    """Another function than what evaluates."""
    return jnp.mean(model(batch["tokens"]) ** 2)


@functools.cache
def engine_of(num_blocks: int, case: str = "") -> jaxpar.Engine:
    """On the stages of a case, or on one device."""
    change = {"num_blocks": num_blocks} | CASES.get(case, {})
    return make_engine(
        make_model(block=Dropping, num_blocks=change.pop("num_blocks"), tied=TIE),
        loss_fn=loss_fn,
        eval_fn=eval_fn,
        sample_batch=make_batch(TRAINED_ROWS),
        accumulate=ACCUMULATE,
        mesh=make_mesh(**change.pop("mesh", {})),
        **change,
    )


def evaluated(engine: jaxpar.Engine, rows: int) -> dict[str, float]:
    return {name: float(x) for name, x in engine.evaluate(make_batch(rows)).items()}


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("case", CASES)
def test_evaluation_on_stages_equals_one_stage_and_the_plain_model(case, rows):
    num_blocks = CASES[case].get("num_blocks", 4)
    one, staged = engine_of(num_blocks), engine_of(num_blocks, case)
    want, got = evaluated(one, rows), evaluated(staged, rows)
    assert got == pytest.approx(want, rel=1e-6)
    batch = make_batch(rows)
    logits = plain_logits(params_of(one), batch["tokens"])
    total, weight, right = (float(x) for x in weighted(logits, batch))
    plain = {"loss": total / weight, "weight": weight, "right": right}
    assert want == pytest.approx(plain, rel=1e-5)


@pytest.mark.slow
def test_evaluation_on_stages_follows_what_is_trained():
    engines = engine_of(4), engine_of(4, "interleaved")
    before = [evaluated(engine, 6)["loss"] for engine in engines]
    again = [evaluated(engine, 6)["loss"] for engine in engines]
    assert again == before, "an evaluation changes nothing"
    for engine in engines:
        engine.step(make_batch(TRAINED_ROWS))
    one, staged = (evaluated(engine, 6)["loss"] for engine in engines)
    # The rows of a micro-batch lie otherwise, but draw by the same keys.
    assert staged == pytest.approx(one, rel=1e-5)
    assert one != pytest.approx(before[0], rel=1e-4)
