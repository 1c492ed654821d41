"""Is a model called by the names of its user's classes?"""

import pytest
from flax import nnx

from jaxpar.model.axis_names import BoundNetwork
from jaxpar.model.bridge import make_network
from jaxpar.model.class_names import class_names
from jaxpar.model.several import SeveralNetworks
from tests.model.toys import BATCHES, LINEN, NNX, LinenEmbed, loss_fn, make_model

SMALL = make_network(lambda rngs: nnx.Linear(2, 2, rngs=rngs), loss_fn, BATCHES[0])


@pytest.mark.parametrize(
    ("network", "name"),
    [
        (SMALL, "Linear"),
        (make_network(LinenEmbed(), loss_fn, BATCHES[0]), "LinenEmbed"),
        (BoundNetwork(SMALL, ("batch",)), "Linear"),
        (SeveralNetworks({"a": SMALL, "b": SMALL}, {}), "a: Linear, b: Linear"),
    ],
)
def test_network_is_called_by_its_class(network, name):
    assert class_names(network) == name


@pytest.mark.parametrize(("parts", "first"), [(NNX, ""), (LINEN, "Linen")])
def test_pipeline_names_its_parts(parts, first):
    network = make_model(parts).make_network(loss_fn, BATCHES[0])
    names = (f"{first}{part}" for part in ("Embed", "Block", "Head"))
    assert class_names(network) == f"PipelineModel({', '.join(names)})"
