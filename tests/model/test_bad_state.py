"""Is mutable state that stages can't update in order refused before a compilation?

What depends on examples is refused on a pipeline, and coupled without one.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpar
from tests.model.toys import BATCHES, VOCAB, WIDTH, Block, make_engine, make_model


class Normed(nnx.Module):
    """A part with batch statistics."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.norm(x)


class Stateful(Block):
    """A block with a number as its state, which `change` replaces in a call."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.number, self.rngs = nnx.Variable(jnp.zeros(())), rngs

    def __call__(self, x, *, positions=None):
        self.number.set_value(self.change(x))
        return super().__call__(x, positions=positions)

    def change(self, x):
        return self.number[...] + 1


class Drawing(Stateful):
    def change(self, x):
        return jax.random.uniform(self.rngs.params())


class CountingRows(Stateful):
    """A data shard has fewer of them than one device."""

    def change(self, x):
        return self.number[...] + x.shape[0]


class HardCoded(Stateful):
    """Fails with another number of rows, so its state can't be compared."""

    def change(self, x):
        return self.number[...] + jnp.zeros(x.shape[0]).reshape(4).shape[0]


def reversed_schedule() -> jaxpar.Schedule:
    """GPipe of two micro-batches, the second one first."""
    plain = jaxpar.make_schedule("gpipe", 2, 2)

    def swapped(slots: np.ndarray) -> np.ndarray:
        index = slots[..., 0]
        other = np.where(index >= 0, 1 - index, index)
        return np.stack([other, slots[..., 1]], axis=-1)

    tables = {name: swapped(getattr(plain, name)) for name in ("forward", "backward")}
    return dataclasses.replace(plain, name="reversed", **tables)


NORMED_EMBED = nn.Sequential([nn.Embed(VOCAB, WIDTH), nn.BatchNorm(False)])
CASES = {
    "rows, in a block": (
        {"block": Normed},
        r"blocks/norm/mean \(the rows of the batch\), blocks/norm/var \(the rows of the"
        r" batch\); with pipe > 1 a part may change only state that depends on its "
        r"parameters and on itself \(a spectral norm's vectors, a count of calls\)\. "
        r"Use layers without it \(a GroupNorm or a LayerNorm for a BatchNorm\), or "
        r"pipe=1, where the model sees full micro-batches\.",
    ),
    "rows, in the embedding": (
        {"embed": NORMED_EMBED},
        r"embed/batch_stats/layers_1/mean \(the rows of the batch\), embed/",
    ),
    "rows, in the head": ({"head": Normed}, r"head/norm/mean \(the rows of the batc"),
    "draws": ({"block": Drawing}, r"blocks/number \(random numbers\); with pipe > 1"),
    "number of rows": ({"block": CountingRows}, r"blocks/number \(the number of row"),
    "number of rows, hard-coded": (
        {"block": HardCoded}, r"blocks/number \(the number of rows\); with pipe > 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_state_that_depends_on_examples_is_refused_on_a_pipeline(case, compiled):
    change, message = CASES[case]
    message = r"^PipelineModel: state of the model depends on examples: " + message
    mesh = jaxpar.MeshShape(data=1, pipe=2)
    with pytest.raises(ValueError, match=message):
        make_engine(make_model(**change), mesh=mesh, accumulate=2)
    assert compiled == []


def test_schedule_that_would_change_state_out_of_order_is_refused(compiled):
    given = {"mesh": jaxpar.MeshShape(pipe=2), "accumulate": 2}
    message = (
        r"schedule='reversed': stage 0, chunk 0 runs the forward of micro-batch 1 "
        r"before that of 0, but the model has mutable state \(blocks/number\), which "
        r"one device changes in the order of the micro-batches; order each chunk's"
    )
    with pytest.raises(ValueError, match=message):
        make_engine(make_model(block=Stateful), schedule=reversed_schedule(), **given)
    assert compiled == []
    make_engine(make_model(), schedule=reversed_schedule(), **given)


@pytest.mark.parametrize(
    ("block", "coupled"),
    [(Stateful, False), (Normed, True), (Drawing, True), (CountingRows, True)],
)
def test_one_stage_couples_only_what_depends_on_examples(block, coupled):
    engine = make_engine(make_model(block=block), mesh=jaxpar.MeshShape(data=2))
    assert engine.spec.coupled == coupled
    before = jax.device_get(engine.state.model_state)
    engine.step(BATCHES[0])
    after = jax.device_get(engine.state.model_state)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert new.shape == old.shape == (3, *new.shape[1:])
        assert not np.array_equal(old, new)
