"""Do a recipe's flags become what they say?"""

import optax
import pytest

from jaxpar import MeshShape
from jaxpar.optim import CommunicationConfig, ZeroPlusPlus, onebit_adam

ADAM = optax.adam(1e-3)


def test_a_stage_without_more_is_a_number() -> None:
    assert CommunicationConfig(zero=1).zero_stage() == 1
    found = CommunicationConfig(gradient_bits=4, secondary=True).zero_stage()
    assert found == ZeroPlusPlus(3, None, 4, None, secondary=True)


def test_replicas_are_joined_if_that_is_asked_for() -> None:
    assert CommunicationConfig().joined(ADAM, MeshShape()) is ADAM
    made = CommunicationConfig(join_every=8).joined(ADAM, MeshShape(replica=4))
    assert (made.replicas, made.every, made.inner) == (4, 8, ADAM)


def test_what_can_not_be_joined_is_refused() -> None:
    with pytest.raises(ValueError, match=r"join_rate=1\.0, join_momentum=0\.9: noth"):
        CommunicationConfig(join_rate=1.0).joined(ADAM, MeshShape(replica=2))
    config = CommunicationConfig(join_every=8)
    with pytest.raises(ValueError, match="join_every=8 joins replicas, and the mesh"):
        config.joined(ADAM, MeshShape())
    with pytest.raises(ValueError, match="join_every=8 needs an inner optimizer of"):
        config.joined(onebit_adam(1e-3, 5), MeshShape(replica=2))
