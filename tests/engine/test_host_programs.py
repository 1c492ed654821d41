"""Does a delayed step begin the host's work before the devices get theirs?

tests/equivalence/test_delayed_update.py has what it trains like.
"""

import optax

import jaxpar
from jaxpar.engine.host_programs import DelayedHost, HostBetween, StepProgram
from tests.equivalence.perceptron import batches, make_engine


def program_of(**options) -> StepProgram:
    given = {"update": "host", "piece_mb": 0.0002, **options}
    offload = jaxpar.Offload(**given)
    engine = make_engine(optax.adam(1e-2), 2, 1, 1, precision="bf16", offload=offload)
    for batch in batches()[:3]:
        engine.step(batch)
    return engine.loss().program.step


def test_only_delayed_updates_have_something_pending() -> None:
    plain, late, begun = (
        program_of(),
        program_of(delayed=True, delay_after=3),
        program_of(delayed=True, delay_after=0),
    )
    assert isinstance(plain, HostBetween)
    assert isinstance(late, DelayedHost)
    assert isinstance(begun, DelayedHost)
    assert (len(late.pending), len(begun.pending)) == (0, 1)
    assert begun.pending[0].model_state == ()
    begun.forget()
    assert begun.pending == []
    assert plain.settled([]) == []


def test_scalars_are_computed_before_the_gradients_and_the_host_works_after(
    monkeypatch,
) -> None:
    order = []
    real = HostBetween.begin

    def begin(self, state, reduced):
        order.append("begin")
        finish = real(self, state, reduced)

        def on_host():
            order.append("on host")
            return finish()

        return on_host

    monkeypatch.setattr(HostBetween, "begin", begin)
    offload = jaxpar.Offload(
        update="host", piece_mb=0.0002, delayed=True, delay_after=0
    )
    engine = make_engine(optax.adam(1e-2), 2, 1, 1, precision="bf16", offload=offload)
    engine.step(batches()[0])  # Compiles.
    own = engine.loss().program.step
    gradients = own.plain.gradients

    def traced(*given):
        order.append("gradients")
        return gradients(*given)

    object.__setattr__(own.plain, "gradients", traced)
    engine.step(batches()[1])
    assert order == ["begin", "gradients", "on host"]
