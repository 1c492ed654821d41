"""Are files that earlier versions wrote still read: runs, checkpoints, budgets?

``fixtures/run_of_2026_11`` was written by commit 9712547 (jax 0.11.2): six steps of
`tests.runs` with a bad batch at the fifth, a budget of another model, and the losses of
the three steps that followed the checkpoint. ``fixtures/gpt_of_2026_11`` was written by
commit 2ca882d: two steps of a GPT on data 2 ("plain") and on data 2 x pipe 2, where its
parameters had other names, and the losses of the two steps after each.
"""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.checkpoint.manifest import read_manifest
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder
from jaxpar.training.metrics import read_metrics
from jaxpar.training.opening import open_run
from jaxpar.training.run import Run
from tests import runs

WRITTEN = Path(__file__).parent / "fixtures" / "run_of_2026_11"
OLD_GPT = Path(__file__).parent / "fixtures" / "gpt_of_2026_11"
IDENTITY = {"corpus_sha256": "of tests.runs"}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    folder = shutil.copytree(WRITTEN, tmp_path / "run")
    return open_run(folder, runs.Config(), IDENTITY)


def test_older_run_resumes_and_trains_on_as_it_did(run: Run) -> None:
    engine, data = runs.fresh(), runs.Data()
    assert run.resume(engine, data) == 6
    wanted = json.loads((WRITTEN / "losses_after.json").read_text())
    got = [float(engine.step(next(data))["loss"]) for _ in wanted]
    # Another jax, or another processor, rounds differently.
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_older_run_of_another_corpus_is_still_refused(run: Run) -> None:
    with pytest.raises(ValueError, match=r"corpus_sha256 is .of tests\.runs. there"):
        open_run(run.folder, runs.Config(), {"corpus_sha256": "another"})


def test_older_logs_are_read(run: Run) -> None:
    steps = [record["step"] for record in read_metrics(run.folder / "metrics.jsonl")]
    assert steps == [1, 2, 3, 4, 5, 6]
    (event,) = run.events()
    assert (event["event"], event["step"], event["batch"]) == ("skipped", 5, 4)
    numbers = run.numbers_before(6, most=2)
    assert [np.isnan(loss) for loss, _ in numbers] == [True, False]


def test_older_budget_still_holds_a_step() -> None:
    engine = jaxpar.initialize(
        model=lambda rngs: nnx.Linear(256, 512, rngs=rngs),
        loss_fn=lambda model, batch: jnp.mean(model(batch) ** 2),
        optimizer=optax.adam(1e-3),
        sample_batch=jax.ShapeDtypeStruct((8, 256), np.float32),
        mesh=jaxpar.MeshShape(data=8),
        zero=2,
    )
    text = (WRITTEN / "budget.json").read_text()
    budget = jaxpar.Budget.from_json(text)
    assert engine.verify(budget).state_bytes == budget.state_bytes
    less = json.loads(text) | {"state_bytes": 100_000}
    with pytest.raises(jaxpar.BudgetExceeded, match="state"):
        engine.verify(jaxpar.Budget.from_json(json.dumps(less)))


@pytest.mark.parametrize(
    ("written", "pipe"),
    [
        ("plain", 2),
        pytest.param("plain", 1, marks=pytest.mark.thorough),
        pytest.param("pipeline", 1, marks=pytest.mark.thorough),
        pytest.param("pipeline", 2, marks=pytest.mark.thorough),
    ],
)
def test_older_gpt_trains_on_as_it_did_on_any_mesh(
    written: str, pipe: int, tmp_path: Path
) -> None:
    size = {"num_layers": 4, "num_heads": 2, "width": 8, "tied_embedding": False}
    tokens = np.random.default_rng(0).integers(0, 16, (4, 8, 9)).astype(np.int32)
    engine = jaxpar.initialize(
        model=make_decoder(DecoderConfig(vocab_size=16, seq_len=8, **size)),
        loss_fn=decoder_loss,
        optimizer=optax.adamw(1e-2, eps=1e-6),
        sample_batch={"tokens": tokens[0]},
        mesh=jaxpar.MeshShape(data=2, pipe=pipe),
        accumulate=2,
    )
    folder = shutil.copytree(OLD_GPT / written, tmp_path / written)
    assert engine.restore(folder) == 2
    wanted = json.loads((OLD_GPT / "losses_after.json").read_text())[written]
    got = [float(engine.step({"tokens": batch})["loss"]) for batch in tokens[2:]]
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    engine.save(folder)  # It continues the run, under the names of today.
    engine.wait()
    assert "params/head/logits/kernel" in read_manifest(folder / "step_00000004").leaves
    assert engine.restore(folder, step=2) == 2
