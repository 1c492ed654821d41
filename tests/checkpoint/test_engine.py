"""Does a run go on from its checkpoint: on any mesh, stage and precision, bit for bit?

Losses after restoring agree to 1e-6 relative where the precision is the same: only the
order of sums differs.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.checkpoint import Checkpoints
from jaxpar.data import Loader, Tokens

BATCH, LENGTH, VOCAB = 16, 6, 40
OTHERS = [
    (8, 1, 1, "fp32"),
    (2, 4, 2, "fp32"),
    (1, 8, 0, "fp32"),
    (1, 1, 3, "bf16"),
    (4, 2, 1, "fp16"),
]


class Net(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.out = nnx.Linear(width, VOCAB, rngs=rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        return self.out(self.norm(self.embed(tokens_BT)))


def loss_fn(model: Net, batch: dict) -> jax.Array:
    tokens = batch["tokens"]
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def make_loader(seed: int = 3) -> Loader:
    tokens = np.random.default_rng(0).integers(0, VOCAB, 700, dtype=np.uint8)
    return Loader(
        Tokens((tokens,), files=("random",)),
        batch_size=BATCH,
        seq_len=LENGTH,
        seed=seed,
    )


def make_engine(
    data: int = 4,
    tensor: int = 2,
    zero: int = 3,
    precision: str = "fp32",
    *,
    width: int = 32,
    seed: int = 0,
) -> jaxpar.Engine:
    shape = jaxpar.MeshShape(data=data, tensor=tensor)
    return jaxpar.initialize(
        model=lambda rngs: Net(width, rngs),
        loss_fn=loss_fn,
        optimizer=optax.adamw(1e-2),
        sample_batch=make_loader().sample_batch,
        mesh=jaxpar.make_mesh(shape, jax.devices()[: data * tensor]),
        zero=zero,
        precision=precision,
        seed=seed,
    )


shared_engine = functools.cache(make_engine)


@dataclasses.dataclass(frozen=True)
class Saved:
    """A run: where it was saved, its bits then, and what it did next."""

    folder: Path
    bits: list[bytes]
    batches: list[np.ndarray]
    losses: list[float]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("runs") / "a"
    engine, loader = make_engine(), make_loader()
    for _ in range(4):
        engine.step(next(loader))
    engine.save(folder, data=loader, meta={"note": "a"})
    state = bits_of(engine.state)
    batches = [next(loader) for _ in range(5)]
    losses = [float(engine.step(batch)["loss"]) for batch in batches]
    engine.wait()
    return Saved(folder, state, [batch["tokens"] for batch in batches], losses)


def bits_of(state: jaxpar.TrainState) -> list[bytes]:
    plain = dataclasses.replace(state, key=jax.random.key_data(state.key))
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(plain)]


def everything_in(folder: Path) -> dict[Path, bytes | None]:
    return {
        path: path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize(("data", "tensor", "zero", "precision"), OTHERS)
def test_checkpoint_goes_on_under_another_mesh_stage_and_precision(
    saved: Saved, data: int, tensor: int, zero: int, precision: str
) -> None:
    engine = shared_engine(data, tensor, zero, precision, seed=1)
    shardings = [leaf.sharding for leaf in jax.tree.leaves(engine.state)]
    assert bits_of(engine.state) != saved.bits
    loader = make_loader()
    assert engine.restore(saved.folder, data=loader) == 4
    assert bits_of(engine.state) == saved.bits
    assert [leaf.sharding for leaf in jax.tree.leaves(engine.state)] == shardings
    losses = []
    for tokens in saved.batches:
        batch = next(loader)
        np.testing.assert_array_equal(batch["tokens"], tokens)
        losses.append(float(engine.step(batch)["loss"]))
    tolerance = 1e-6 if precision == "fp32" else 1e-2
    assert losses == pytest.approx(saved.losses, rel=tolerance)


def test_fp16_starts_at_its_loss_scale_from_a_checkpoint_of_fp32(saved: Saved) -> None:
    engine = shared_engine(4, 2, 1, "fp16", seed=1)
    engine.restore(saved.folder)
    metrics = engine.step(next(make_loader()))
    assert float(metrics["loss_scale"]) == 2.0**16


def test_loss_scale_survives_a_run_in_fp32(tmp_path: Path) -> None:
    half, full = shared_engine(4, 2, 1, "fp16", seed=1), make_engine(8, 1)
    scaler = dataclasses.replace(
        half.state.carried["loss_scale"], scale=jnp.float32(2.0**11)
    )
    state = dataclasses.replace(half.state, carried={"loss_scale": scaler})
    checkpoints = Checkpoints(tmp_path / "half")
    checkpoints.save(int(half.state.step), state)
    checkpoints.close()
    full.restore(tmp_path / "half")
    assert float(full.step(next(make_loader()))["loss_scale"]) == 1.0
    full.save(tmp_path / "full")
    full.wait()
    half.restore(tmp_path / "full")
    assert float(half.step(next(make_loader()))["loss_scale"]) == 2.0**11


def test_checkpoint_of_another_model_is_refused_naming_leaves(saved: Saved) -> None:
    engine = make_engine(1, 1, 0, width=24)
    before, loader = bits_of(engine.state), make_loader()
    with pytest.raises(ValueError, match="another model or optimizer") as error:
        engine.restore(saved.folder, data=loader)
    text = str(error.value)
    assert "params/embed/embedding: float32[40,24], in the checkpoint " in text
    assert "float32[40,32]" in text
    assert bits_of(engine.state) == before
    assert loader.get_state()["rows"] == 0


def test_checkpoint_with_data_of_another_order_changes_nothing(saved: Saved) -> None:
    engine = shared_engine(8, 1, 1, "fp32", seed=1)
    before = bits_of(engine.state)
    with pytest.raises(ValueError, match="another stream of batches: seed was 3"):
        engine.restore(saved.folder, data=make_loader(seed=4))
    assert bits_of(engine.state) == before


def test_checkpoint_without_data_is_refused_where_data_is_asked_for(
    tmp_path: Path,
) -> None:
    engine = shared_engine(8, 1, 1, "fp32", seed=1)
    engine.save(tmp_path)
    before = bits_of(engine.state)
    with pytest.raises(ValueError, match="holds no position in the data"):
        engine.restore(tmp_path, data=make_loader())
    assert bits_of(engine.state) == before


@pytest.mark.parametrize(
    ("width", "text"), [(32, "holds another run, up to step 4"), (24, "another model")]
)
def test_save_into_the_folder_of_another_run_is_refused_and_loses_nothing(
    saved: Saved, width: int, text: str
) -> None:
    engine = shared_engine(1, 1, 0, width=width)
    before = everything_in(saved.folder)
    for _ in range(2):
        engine.step(next(make_loader()))
        with pytest.raises(ValueError, match=text):
            engine.save(saved.folder)
    assert everything_in(saved.folder) == before


def test_save_returns_before_the_disk_and_outlives_the_donation_by_later_steps(
    tmp_path: Path, disk: Any
) -> None:
    engine, loader = shared_engine(8, 1, 1, "fp32", seed=1), make_loader()
    disk.release.clear()
    # Reading the state itself would keep the steps from reusing its memory.
    copied = jax.tree.map(jnp.copy, engine.state)
    engine.save(tmp_path, data=loader)
    saved, step = bits_of(copied), int(copied.step)
    for _ in range(3):
        engine.step(next(loader))
    assert Checkpoints(tmp_path).latest() is None
    disk.release.set()
    engine.wait()
    assert Checkpoints(tmp_path).latest() == step
    assert bits_of(engine.state) != saved
    assert engine.restore(tmp_path, data=loader) == step
    assert bits_of(engine.state) == saved
    assert loader.get_state()["rows"] == 0


def test_keep_of_a_save_counts_after_a_restore(tmp_path: Path) -> None:
    engine = shared_engine(8, 1, 1, "fp32", seed=1)
    batch, saved = next(make_loader()), []
    for _ in range(5):
        engine.save(tmp_path, keep=None)
        saved.append(int(engine.state.step))
        engine.wait()
        engine.restore(tmp_path)
        engine.step(batch)
    again = make_engine(8, 1, 1, "fp32")
    again.restore(tmp_path)
    again.step(batch)
    again.save(tmp_path, keep=None)
    again.wait()
    assert Checkpoints(tmp_path).steps() == [*saved, saved[-1] + 1]
    again.step(batch)
    again.save(tmp_path, keep=2)
    again.wait()
    assert Checkpoints(tmp_path).steps() == [saved[-1] + 1, saved[-1] + 2]


def test_parameters_alone_are_taken_up_to_fine_tune(saved: Saved) -> None:
    engine = shared_engine(8, 1, 1, "fp32", seed=1)
    before = engine.state
    step, moments = int(before.step), bits_of_tree(before.opt_state)
    assert engine.restore(saved.folder, only=["params/*"]) == 4
    assert int(engine.state.step) == step
    assert bits_of_tree(engine.state.opt_state) == moments
    whole = make_engine(8, 1, 1)
    whole.restore(saved.folder)
    assert bits_of_tree(engine.state.params) == bits_of_tree(whole.state.params)
    engine.step(next(make_loader()))


def test_another_optimizer_starts_anew_only_where_asked(saved: Saved) -> None:
    engine = jaxpar.initialize(
        model=lambda rngs: Net(32, rngs),
        loss_fn=loss_fn,
        optimizer=optax.sgd(0.1, momentum=0.9),
        sample_batch=make_loader().sample_batch,
        mesh=jaxpar.make_mesh(jaxpar.MeshShape(data=8)),
        zero=1,
    )
    with pytest.raises(ValueError, match=r"(?s)opt_state/0/trace/.*only=, reset=, re"):
        engine.restore(saved.folder)
    assert engine.restore(saved.folder, reset=["opt_state/*"]) == 4
    assert int(engine.state.step) == 4
    engine.step(next(make_loader()))


def test_damaged_newest_step_gives_way_to_the_one_before(tmp_path: Path) -> None:
    engine, loader = shared_engine(8, 1, 1, "fp32", seed=1), make_loader()
    steps = []
    for _ in range(2):
        engine.step(next(loader))
        engine.save(tmp_path, data=loader)
        steps.append(int(engine.state.step))
    engine.wait()
    file = next((tmp_path / f"step_{steps[1]:08d}" / "arrays").rglob("d/*"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.warns(UserWarning, match=f"{file.name}: another checksum.*restoring"):
        assert engine.restore(tmp_path, data=loader) == steps[0]
    assert loader.rows == BATCH
    engine.step(next(loader))
    with pytest.warns(UserWarning, match=r"renamed to end in '\.damaged'"):
        engine.save(tmp_path, data=loader)
    engine.wait()
    assert Checkpoints(tmp_path).steps() == steps


def bits_of_tree(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
