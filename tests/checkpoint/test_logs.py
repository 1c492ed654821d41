"""Are only those messages of Orbax dropped that its caller knows already?"""

import logging
import os

import pytest

from jaxpar.checkpoint.logs import quiet_orbax

ORBAX = os.path.join(os.sep, "site", "orbax", "checkpoint", "checkpointer.py")
OTHER = os.path.join(os.sep, "site", "absl", "app.py")


@pytest.fixture
def passes(monkeypatch):
    """Whether a message passes the filters that are added."""
    logger = logging.getLogger("absl")
    monkeypatch.setattr(logger, "filters", [])

    def passes(path: str, text: str, *, error: bool = False) -> bool:
        logger.filters.clear()
        quiet_orbax()
        trace = (ValueError, ValueError("x"), None) if error else None
        record = logging.LogRecord("absl", logging.ERROR, path, 1, text, (), trace)
        return bool(logger.filter(record))

    return passes


def test_messages_that_repeat_what_is_known_are_dropped(passes):
    assert not passes(ORBAX, "Waiting for previous save to complete took 3.2 seconds.")
    assert not passes(ORBAX, "an error that wait() raises", error=True)


def test_all_other_messages_stay(passes):
    assert passes(ORBAX, "another message")
    assert passes(OTHER, "Waiting for previous save to complete took 3.2 seconds.")
    assert passes(OTHER, "an error", error=True)


def test_errors_stay_where_there_are_several_processes(passes, monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: 2)
    assert passes(ORBAX, "failed", error=True)
