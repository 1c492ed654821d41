"""Does a GPT learn as much of real text from a pattern's blocks as from all of them?"""

import dataclasses
import itertools

import jax
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.data import Loader, stdlib_source
from jaxpar.models import decoder_config, decoder_loss, make_decoder
from jaxpar.sparse_attention import SparsityPattern, causal_pattern
from jaxpar.training.run import mean_loss

ROWS, LENGTH, STEPS = 8, 256, 200
NAMES = ("fixed", "variable", "bigbird", "longformer", "sliding")
# The least that the pattern has to make of them for the comparison to mean something.
LEARNT = 2.6

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:blocks of 16 on tiles"),
]


def heldout_loss(attention: str | SparsityPattern) -> float:
    """After training on the standard library's source, in nats a byte."""
    model = dataclasses.replace(
        decoder_config("tiny", seq_len=LENGTH, num_layers=2), attention=attention
    )
    corpus, heldout = stdlib_source()
    loader = Loader(corpus, batch_size=ROWS, seq_len=LENGTH, seed=0)
    held = Loader(heldout, batch_size=ROWS, seq_len=LENGTH, repeat=False)
    engine = jaxpar.initialize(
        model=make_decoder(model),
        loss_fn=decoder_loss,
        optimizer=optax.adamw(2e-3),
        sample_batch={"tokens": jax.ShapeDtypeStruct((ROWS, LENGTH + 1), np.int32)},
        mesh=jaxpar.make_mesh(jaxpar.MeshShape(data=2), jax.devices()[:2]),
        zero=1,
        clip_norm=1.0,
    )
    for batch in itertools.islice(loader, STEPS):
        jax.block_until_ready(engine.step(batch))
    return mean_loss(engine, itertools.islice(held, 16))


@pytest.fixture(scope="module")
def dense() -> float:
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    loss = heldout_loss("auto")
    jax.config.update("jax_disable_most_optimizations", before)
    assert loss < LEARNT
    return loss


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("name", NAMES)
def test_pattern_learns_within_5_percent_of_dense(name: str, dense: float) -> None:
    """A quarter of the keys, at the most, for most of the queries."""
    sizes = {"block": 16, "window": 32, "global_tokens": 16}
    loss = heldout_loss(causal_pattern(name, num_heads=4, **sizes))
    print(f"{name}: {loss:.4f} for dense attention's {dense:.4f}")
    assert loss < 1.05 * dense
    assert loss != pytest.approx(dense, rel=1e-6)


@pytest.mark.usefixtures("optimized")
def test_all_blocks_learn_as_dense_attention_does(dense: float) -> None:
    """1e-3: rounding, over two hundred steps."""
    loss = heldout_loss(
        causal_pattern("dense", num_heads=4, block=16, window=16, global_tokens=16)
    )
    assert loss == pytest.approx(dense, rel=1e-3)
