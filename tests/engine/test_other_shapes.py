"""Which shapes can an engine take beside the sample's, and what is said of others?"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.engine.other_shapes import scaled
from jaxpar.pipeline.schedules.gpipe import make_gpipe


def batch(rows: int = 16, length: int = 6, dtype: Any = np.float32) -> dict:
    return {"x": np.ones((rows, length, 4), dtype)}


def loss(model: Any, batch: dict) -> jax.Array:
    return jnp.mean((model(batch["x"]) - 1.0) ** 2)


def make_engine(*others: Any, **given: Any) -> jaxpar.Engine:
    return jaxpar.initialize(
        **{
            "model": lambda rngs: nnx.Linear(4, 3, rngs=rngs),
            "loss_fn": loss,
            "optimizer": optax.sgd(0.1),
            "sample_batch": batch(),
            "other_shapes": others,
            "mesh": jaxpar.MeshShape(data=4),
            "devices": jax.devices()[:4],
            "accumulate": 2,
            **given,
        }
    )


@pytest.mark.parametrize(
    ("accumulate", "rows", "found"),
    [(2, 16, 2), (2, 32, 4), (2, 8, 1), (4, 8, 2), (1, 8, 1), (2, 24, 3), (2, 12, 2)],
)
def test_a_micro_batch_keeps_its_rows(accumulate: int, rows: int, found: int) -> None:
    assert scaled(accumulate, rows, 16) == found


def test_accumulation_of_each_shape_is_by_its_rows() -> None:
    engine = make_engine(batch(8), batch(32), batch(16, 2))
    found = [each.spec.accumulate for each in engine.loss().others]
    assert found == [1, 4, 2]
    assert engine.spec.accumulate == 2
    assert engine.arguments["other_shapes"] == ()


def test_a_shape_is_compiled_when_it_first_comes(compiled: list[str]) -> None:
    engine = make_engine(batch(16, 2), batch(8))
    compiled.clear()
    for own in (batch(), batch(16, 2), batch(), batch(16, 2)):
        engine.step(own)
    assert compiled.count("jit(step)") == 2
    state, _ = engine.train_step(engine.state, batch(8))
    assert int(state.step) == 5


def test_without_others_shapes_that_come_by_accident_are_refused() -> None:
    said = r"leaf x is float32\[16, 2, 4\], but must be float32\[16, 6, 4\], as in "
    with pytest.raises(ValueError, match=said + r"sample_batch\.$"):
        make_engine().step(batch(16, 2))


@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_a_batch_that_fits_none_is_told_which_do(call: str) -> None:
    engine = make_engine(batch(16, 2), batch(8))
    said = r"as in sample_batch\. Or as in other_shapes: x float32\[16, 2, 4\]; x "
    with pytest.raises(ValueError, match=said + r"float32\[8, 6, 4\]\.$"):
        getattr(engine, call)(batch(16, 5))


@pytest.mark.usefixtures("checked_losses")
def test_the_loss_of_each_shape_is_checked() -> None:
    def sum_of_short_rows(model: Any, batch: dict) -> jax.Array:
        found = (model(batch["x"]) - 1.0) ** 2
        return found.sum() if batch["x"].shape[1] == 2 else found.mean()

    engine = make_engine(batch(16, 2), loss_fn=sum_of_short_rows)
    engine.step(batch())
    with pytest.raises(ValueError, match="not a mean over the rows of its batch"):
        engine.step(batch(16, 2))


class OfLength(nn.Module):
    """Has a weight for every place."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (x.shape[1], 1)
        return x * self.param("places", nn.initializers.ones, shape)


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "one batch": (
        batch(),
        {},
        r"other_shapes=dict must be a list .* write other_shapes=\[batch\]",
    ),
    "no array": ([{"x": [1.0]}], {}, r"other_shapes\[0\]: leaf x is a list"),
    "dtype": (
        [batch(dtype=np.int32)],
        {},
        r"leaf x is int32\[16, 6, 4\], but float32\[16, 6, 4\] in sample_batch",
    ),
    "dims": (
        [{"x": np.ones((16, 4), np.float32)}],
        {},
        r"float32\[16, 4\], but .* their number and the dtype must be the same",
    ),
    "leaves": (
        [batch() | {"y": np.ones(16)}],
        {},
        r"other_shapes\[0\]: its structure .* only shapes may differ",
    ),
    "rows of no device": (
        [batch(8), batch(12)],
        {},
        r"other_shapes\[1\]: 12 rows must be .* \(accumulate here is 2: 2 x 12 / 16,",
    ),
    "the sample's": ([batch()], {}, r"batches of x float32\[16, 6, 4\] are taken"),
    "the same twice": (
        [batch(8), batch(8)],
        {},
        r"other_shapes\[1\]: batches of x float32\[8, 6, 4\] are taken already",
    ),
    "a state of the length": (
        [batch(16, 2)],
        {"model": OfLength()},
        r"leaf params/places of the state is float32\[2, 1\] with these shapes, but "
        r"float32\[6, 1\]",
    ),
    "several losses": (
        [batch(8)],
        {
            "model": {"a": lambda rngs: nnx.Linear(4, 3, rngs=rngs)},
            "loss_fn": {"a": lambda models, batch: loss(models["a"], batch)},
        },
        "other_shapes: an engine with several losses takes batches of each loss's",
    ),
}


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("name", BAD)
def test_shapes_that_cannot_be_are_refused(name: str, compiled: list[str]) -> None:
    others, given, said = BAD[name]
    with pytest.raises(ValueError, match=said):
        make_engine(**{"other_shapes": others, **given})
    assert "jit(step)" not in compiled


def piped(**given: Any) -> dict[str, Any]:
    return {
        "mesh": jaxpar.MeshShape(data=2, pipe=2),
        "model": jaxpar.PipelineModel(
            embed=lambda rngs: nnx.Linear(4, 4, rngs=rngs),
            sections=[(lambda rngs: nnx.Linear(4, 4, rngs=rngs), 2)],
            head=lambda rngs: nnx.Linear(4, 3, rngs=rngs),
        ),
        **given,
    }


@pytest.mark.thorough
def test_asynchronous_schedules_are_refused() -> None:
    said = r"other_shapes: with schedule='pipedream_2bw' batches are under way"
    with pytest.raises(ValueError, match=said):
        make_engine(batch(16, 2), **piped(schedule="pipedream_2bw", zero=0))


@pytest.mark.thorough
def test_a_table_for_other_micro_batches_is_refused() -> None:
    given = piped(schedule=make_gpipe(2, 2))
    assert make_engine(batch(16, 2), **given).loss().others
    said = r"other_shapes\[0\]: schedule='gpipe' is made for 2 stages and 2 micro-"
    with pytest.raises(ValueError, match=said):
        make_engine(batch(8), **given)
