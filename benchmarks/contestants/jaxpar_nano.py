"""nanoGPT's character setting by jaxpar: TRAIN WINDOWS OUT SEED STEPS.

TRAIN is an .npy of all tokens; WINDOWS and OUT are as of torch_nano_logits.py.
Prints the milliseconds of each step but the first.
"""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jaxpar
from jaxpar.data import Loader, Tokens, Windows, batch_shapes
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder

BATCH, LENGTH = 12, 64


def main() -> None:
    """Train, print times, write logits."""
    train, windows, out, seed, steps = sys.argv[1:]
    ids, number = np.load(train), int(steps)
    vocab = int(ids.max()) + 1
    config = DecoderConfig(
        vocab_size=vocab,
        seq_len=LENGTH,
        num_layers=4,
        num_heads=4,
        width=128,
        activation="gelu_exact",
        bias=False,
    )
    rate = optax.join_schedules(
        [
            lambda count: 1e-3 * (count + 1) / 101,
            optax.cosine_decay_schedule(1e-3, number - 100, alpha=0.1),
        ],
        [100],
    )
    optimizer = optax.adamw(
        *(rate, 0.9, 0.99),
        weight_decay=0.1,
        mask=jaxpar.optim.decayed,
    )
    engine = jaxpar.initialize(
        model=make_decoder(config),
        loss_fn=decoder_loss,
        optimizer=optimizer,
        sample_batch=batch_shapes(BATCH, LENGTH),
        # Two devices use two cores better than one that runs its kernels on both.
        mesh=jaxpar.MeshShape(data=2),
        devices=jaxpar.cpu_devices(2),
        zero=0,
        clip_norm=1.0,
        seed=int(seed),
    )
    rows = Windows(Tokens((ids,), files=(train,)), seq_len=LENGTH)
    loader = Loader(rows, batch_size=BATCH, seed=int(seed))
    times, before = [], engine.step(next(loader))
    for _ in range(1, number):
        began = time.perf_counter()
        metrics = engine.step(next(loader))
        float(before["loss"])  # As jaxpar.train reads it: the next step has begun.
        before = metrics
        times.append(1000 * (time.perf_counter() - began))
    print(*(f"{x:.3f}" for x in times))
    model = jax.jit(engine.model())
    inputs = np.load(windows)[:, :-1].astype(np.int32)
    found = [np.asarray(model(jnp.asarray(x))) for x in np.array_split(inputs, 24)]
    np.save(out, np.concatenate(found))


if __name__ == "__main__":
    main()
