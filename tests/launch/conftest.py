"""Connections of supervisors for tests, closed with them."""

from collections.abc import Iterator

import pytest

from jaxpar.launch.store import Store
from tests.launch.connections import SECRET, close_all, opened


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_all()


@pytest.fixture
def store() -> Store:
    """A leader's, on this machine, for eight hosts."""
    return opened(Store("127.0.0.1", SECRET, 8))
