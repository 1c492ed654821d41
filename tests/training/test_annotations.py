"""Are phases inside of their steps, and evaluations and saves outside of them?"""

import pytest

from jaxpar.training.annotations import Annotations


@pytest.fixture
def log(monkeypatch):
    """What begins and ends, in order."""
    log: list[str] = []

    class Noted:
        def __init__(self, name, step_num=None):
            self.name = name if step_num is None else f"{name} {step_num}"

        def __enter__(self):
            log.append(f"+{self.name}")

        def __exit__(self, *_):
            log.append(f"-{self.name}")

    monkeypatch.setattr("jax.profiler.TraceAnnotation", Noted)
    monkeypatch.setattr("jax.profiler.StepTraceAnnotation", Noted)
    return log


def test_annotations_are_nested(log):
    own = Annotations()
    own.enter("data", 1)
    own.enter("step", 1)
    own.enter("data", 2)
    own.enter("save")
    own.enter("step")
    own.close()
    own.close()
    assert log == [
        *("+train 1", "+loop/data", "-loop/data", "+loop/step", "-loop/step"),
        *("-train 1", "+train 2", "+loop/data", "-loop/data", "-train 2"),
        *("+loop/save", "-loop/save", "+loop/step", "-loop/step"),
    ]
