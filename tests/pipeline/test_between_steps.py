"""Does a synchronous step end what it begins?"""

from jaxpar.pipeline.between_steps import NothingBetweenSteps


def test_nothing_is_there_between_steps():
    own = NothingBetweenSteps()
    assert (own.delay, own.synchronous_steps, own.versions) == (0, 0, 1)
    assert own.pace is None
    assert own.took_batch({}) is True
