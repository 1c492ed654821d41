"""Does `resume` say what it needs, and draw the batches of the steps taken?

tests/equivalence/test_offload_to_disk.py resumes; tests/checkpoint restore.
"""

from pathlib import Path

import optax
import pytest

import jaxpar
from tests.equivalence.perceptron import batches, make_engine


def test_an_engine_with_nothing_on_disk_says_what_to_do() -> None:
    engine = make_engine(optax.sgd(0.1), 1, 1, 0)
    with pytest.raises(ValueError, match=r"resume: .*optimizer='disk'.*restore"):
        engine.resume()


def test_data_at_a_checkpoint_s_position_is_drawn_from_there(tmp_path: Path) -> None:
    def made() -> jaxpar.Engine:
        offload = jaxpar.Offload(
            optimizer="disk", path=str(tmp_path / "state"), piece_mb=0.0002
        )
        return make_engine(optax.adam(1e-2), 2, 1, 3, offload=offload)

    engine = made()
    for number, batch in enumerate(batches()[:5]):
        if number == 2:
            engine.save(tmp_path / "checkpoints")
            engine.wait()
        engine.step(batch)
    del engine
    engine, data = made(), iter(range(2, 9))
    assert engine.restore(tmp_path / "checkpoints") == 2
    assert engine.resume(data=data) == 5
    assert next(data) == 5
    assert (engine.steps, engine.resume()) == (5, 5)


def test_a_state_that_is_newer_than_the_disk_s_is_kept(tmp_path: Path) -> None:
    disk = jaxpar.Offload(optimizer="disk", path=str(tmp_path / "a"), piece_mb=0.0002)
    engine, other = (
        make_engine(optax.adam(1e-2), 2, 1, 3, offload=offload)
        for offload in (disk, None)
    )
    engine.step(batches()[0])
    for batch in batches()[:3]:
        other.step(batch)
    other.save(tmp_path / "checkpoints")
    other.wait()
    assert engine.restore(tmp_path / "checkpoints") == 3
    assert engine.resume() == 3
    losses = [float(each.step(batches()[3])["loss"]) for each in (engine, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
