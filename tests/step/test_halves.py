"""Is a loss of some rows that of their halves, with the same draws?"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.step.halves import in_halves
from jaxpar.step.inputs import Inputs, Replicated, make_inputs, num_rows
from jaxpar.step.row_draws import BatchRows, OwnRows, ShardKey
from jaxpar.step.weighted import Sum, Weighted


def loss_of(shards: int, calls: list[int]):
    """A loss that draws a number for each row."""

    def drawn(key: jax.Array, leaves: list, inputs: Inputs) -> dict:
        x = inputs.batch["x"]
        noise = jax.random.normal(key, x.shape)
        total = jnp.sum(leaves[0] * (x + noise) * inputs.batch["scale"].value)
        return {
            "loss": Weighted(total, jnp.float32(x.shape[0])),
            "noise": Sum(noise[0]),
        }

    def loss(leaves: list, state: int, key: ShardKey, inputs: Inputs) -> tuple:
        calls.append(num_rows(inputs))
        rows = BatchRows(num_rows(inputs), lambda: (leaves, twice(inputs)))
        return OwnRows(shards).call(drawn, key, (leaves, inputs), rows), state + 1

    def twice(inputs: Inputs) -> Inputs:
        x = inputs.batch["x"]
        wide = jax.ShapeDtypeStruct((2 * x.shape[0],), x.dtype)
        return make_inputs({**inputs.batch, "x": wide}, jnp.int32(0))

    return loss


def test_halves_draw_the_numbers_of_their_rows() -> None:
    batch = {"x": jnp.arange(4.0), "scale": Replicated(jnp.float32(3.0))}
    given = [jnp.float32(2.0)], jnp.int32(0)
    calls: list[int] = []
    for shard in (0, 1):
        key = ShardKey(jax.random.key(7), jnp.int32(shard))
        whole, state = loss_of(2, calls)(*given, key, make_inputs(batch, jnp.int32(0)))
        halves = in_halves(loss_of(4, calls))
        found, after = halves(*given, key, make_inputs(batch, jnp.int32(0)))
        np.testing.assert_allclose(found["loss"].total, whole["loss"].total, rtol=1e-6)
        assert found["loss"].weight == whole["loss"].weight == 4
        assert found["noise"].value != whole["noise"].value, "a sum over both halves"
        assert after == state == 1
    assert set(calls) == {4, 2}
