"""Are the parts that a user adds to the state checked, by name?"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.checkpoint.folder import step_path
from jaxpar.checkpoint.manifest import read_manifest
from jaxpar.optim.ema import Ema
from jaxpar.step.carried import Carried, Stepped, check_carried
from tests.equivalence.perceptron import batches, make_engine


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([0.999], TypeError, r"carried: 0.999 must have a name, init\(params\) and"),
        ([Ema(0.9), Ema(0.99)], ValueError, r"'ema' is the name of two parts"),
        ([Ema(0.9, "loss_scale")], ValueError, r"'loss_scale' is the name of two"),
        ([Ema(0.9, "reduction")], ValueError, r"'reduction' is the name of two"),
        ([Ema(0.9, "a/b")], ValueError, r"Ema is named 'a/b'; the name is a key of"),
        ([Ema(0.9, "")], ValueError, r"Ema is named ''; the name is a key of"),
    ],
    ids=str,
)
def test_parts_that_can_not_be_carried_are_refused(parts, error, message):
    with pytest.raises(error, match=message):
        check_carried(parts)


def test_parts_of_different_names_are_taken():
    check_carried([Ema(0.9), Ema(0.99, "slow")])


@dataclasses.dataclass(frozen=True)
class Counts(Carried):
    """Steps taken, counted beside the biases: by every shard, or once."""

    per_shard: bool = True
    saved: bool = True
    name: str = "counts"

    def init(self, params: Any) -> Any:
        return {"up": {"bias": jnp.zeros_like(params["up"]["bias"]) + 5}}

    def spec(self, name: str, shape: tuple[int, ...]) -> P:
        assert (name, shape) == ("up/bias", (64,))
        return P("tensor")

    def after(self, part: Any, stepped: Stepped) -> Any:
        return jax.tree.map(lambda x: x + stepped.applied, part)


def engine_of(part: Carried, data: int, tensor: int) -> jaxpar.Engine:
    return make_engine(optax.sgd(0.1), data, tensor, 1, carried=[part])


def test_part_per_shard_has_the_shards_as_dim_0_and_is_sharded_as_it_says():
    engine = engine_of(Counts(), 4, 2)
    engine.step(batches()[0])
    counts = engine.state.carried["counts"]["up"]["bias"]
    assert counts.shape == (4, 64)
    assert counts.sharding.spec == P("data", "tensor")
    np.testing.assert_array_equal(counts, 6)


@pytest.mark.parametrize("per_shard", [True, False])
def test_part_that_is_not_saved_begins_anew(per_shard, tmp_path: Path):
    """With the parameters that were restored."""
    engine = engine_of(Counts(per_shard, saved=False), 4, 1)
    engine.step(batches()[0])
    engine.save(tmp_path)
    engine.wait()
    held = read_manifest(step_path(tmp_path, 1)).leaves
    assert "params/up/bias" in held
    assert not any("counts" in name for name in held)
    engine.step(batches()[1])
    engine.restore(tmp_path)
    counts = engine.state.carried["counts"]["up"]["bias"]
    assert counts.shape == ((4, 64) if per_shard else (64,))
    np.testing.assert_array_equal(counts, 5)
    only = ["params/*"]
    engine.step(batches()[1])
    engine.restore(tmp_path, only=only)  # What is not asked for is left as it is.
    np.testing.assert_array_equal(engine.state.carried["counts"]["up"]["bias"], 6)
