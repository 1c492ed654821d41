"""Is a store of layers recognised by its methods?"""

import pytest

from jaxpar.step.layer_store import LayerStore, raise_failure


class InMemory:
    def read(self, position, number, shape):
        return position, number, shape

    def write(self, position, number, grad):
        return position, number, grad

    def __init__(self, failure=None):
        self.failed = failure

    def failure(self):
        return self.failed


def test_whatever_reads_and_writes_is_one() -> None:
    assert isinstance(InMemory(), LayerStore)
    assert not isinstance(object(), LayerStore)


def test_the_first_failure_is_raised() -> None:
    raise_failure([InMemory(), InMemory()])
    with pytest.raises(OSError, match="the first"):
        raise_failure([InMemory(), InMemory(OSError("the first")), InMemory(OSError())])
