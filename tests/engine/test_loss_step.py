"""Is a loss's step inspected as that of an engine with one loss?"""

import pytest

import jaxpar
from jaxpar.engine.compiled_step import CompiledStep
from jaxpar.engine.loss_step import LossStep, skipped_steps, unknown_loss
from jaxpar.engine.run_ahead import SkippedStepWarning
from tests.equivalence.several_losses import batches, make_engine


@pytest.fixture(scope="module")
def engine() -> jaxpar.Engine:
    return make_engine("adversarial", jaxpar.MeshShape(data=4), 2)


def test_a_losss_step_is_compiled_and_lowered_by_itself(engine):
    own = engine.loss("gen")
    assert isinstance(own, LossStep)
    assert isinstance(own, CompiledStep)
    assert list(own.traces()) == ["step"]
    assert own.lower().compile().as_text() != engine.loss("disc").lower().compile()
    budget = own.budget()
    assert own.verify(budget) == budget
    assert engine.loss("disc").budget() != budget


def test_a_single_loss_is_the_engines_own():
    engine = make_engine("distillation", jaxpar.MeshShape(data=2), 1)
    assert engine.loss("student").spec is engine.spec
    assert engine.loss("student").batch_spec is engine.batch_spec


def test_skipped_steps_are_counted_by_loss(engine):
    bad = {**batches()[0], "noise": batches()[0]["noise"] * float("nan")}
    engine.step(bad, loss="gen")
    engine.step(batches()[0], loss="disc")
    with pytest.warns(SkippedStepWarning, match=r"^step 1 was skipped \(1 so far\)"):
        engine.wait()
    losses = {name: engine.loss(name) for name in ("disc", "gen")}
    assert skipped_steps(losses, engine.state) == {"disc": 0, "gen": 1}


def test_unknown_loss_says_which_there_are(engine):
    known = dict.fromkeys(("disc", "gen"), engine.loss("gen"))
    assert "'gne' is none of this engine's losses: 'disc', 'gen'." in unknown_loss(
        "gne", known
    )
    assert "name one: engine.step(batch, loss='disc')" in unknown_loss(None, known)
    single = {None: engine.loss("gen")}
    assert "one loss, which has no name; omit loss" in unknown_loss("gen", single)
