"""Has a GPT one tree on every mesh: is a checkpoint of any read on any other?"""

import itertools
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder
from jaxpar.tree import named_leaves

CONFIG = DecoderConfig(vocab_size=32, seq_len=8, num_layers=4, num_heads=2, width=16)
TOKENS = np.random.default_rng(0).integers(0, 32, (4, 8, 9)).astype(np.int32)
# One after the other: pipe, tensor, schedule.
MESHES = [(1, 1, "1f1b"), (2, 1, "interleaved"), (4, 1, "1f1b"), (1, 2, "1f1b")]


def make_engine(
    pipe: int, tensor: int = 1, schedule: str = "1f1b", zero: int = 1
) -> jaxpar.Engine:
    mesh = jaxpar.MeshShape(data=2 if pipe > 1 or tensor > 1 else 1, pipe=pipe)
    return jaxpar.initialize(
        model=make_decoder(CONFIG),
        loss_fn=decoder_loss,
        optimizer=optax.adamw(1e-3, eps=1e-6),
        sample_batch={"tokens": TOKENS[0]},
        mesh=jaxpar.MeshShape(mesh.data, pipe, tensor),
        zero=zero,
        accumulate=4,
        schedule=schedule,
    )


def equal(left: jaxpar.Engine, right: jaxpar.Engine) -> bool:
    """Whether all leaves of the state are, by name and to the bit."""
    states = [named_leaves(engine.state) for engine in (left, right)]
    keys = [state.pop("key") for state in states]
    np.testing.assert_array_equal(*map(jax.random.key_data, keys))
    assert list(states[0]) == list(states[1])
    return all(np.array_equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.thorough
@pytest.mark.parametrize("stages", [(0, 3, 2, 1), (2, 1, 0, 3)], ids=str)
def test_checkpoint_moves_from_pipe_to_pipe_to_the_bit(
    stages: tuple[int, ...], tmp_path: Path
):
    """And from each ZeRO stage to another."""
    one = make_engine(1, zero=0)
    right = [float(one.step({"tokens": tokens})["loss"]) for tokens in TOKENS]
    engines = [
        make_engine(*mesh, zero=zero) for mesh, zero in zip(MESHES, stages, strict=True)
    ]
    losses = [float(engines[0].step({"tokens": TOKENS[0]})["loss"])]
    for tokens, (here, there) in zip(
        TOKENS[1:], itertools.pairwise(engines), strict=True
    ):
        here.save(tmp_path)
        here.wait()
        there.restore(tmp_path)
        assert equal(here, there)
        losses.append(float(there.step({"tokens": tokens})["loss"]))
    assert losses == pytest.approx(right, rel=1e-5)
    end, start = jax.device_get((engines[-1].state.params, one.state.params))
    for name, leaf in named_leaves(end).items():
        error = np.linalg.norm(leaf - named_leaves(start)[name])
        assert error < 1e-5 * np.linalg.norm(leaf), name
