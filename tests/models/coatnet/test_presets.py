"""Have the CoAtNets the parameters and multiply-adds of the paper's tables?"""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxpar.jaxprs.evaluate import flops
from jaxpar.models.coatnet.config import CoatnetConfig
from jaxpar.models.coatnet.model import make_coatnet
from jaxpar.models.coatnet.presets import COATNET_PRESETS, coatnet_config
from tests.models.grouped_convolution import with_groups

# Preset, image size: millions of parameters, billions of multiply-adds. Tables 3 and 4.
PUBLISHED = {
    ("coatnet-0", 224): (25, 4.2),
    ("coatnet-1", 224): (42, 8.4),
    ("coatnet-2", 224): (75, 15.7),
    ("coatnet-3", 224): (168, 34.7),
    ("coatnet-4", 384): (275, 189.5),
}


@functools.cache
def counted(config: CoatnetConfig) -> tuple[float, float]:
    """Millions of parameters, and billions of multiply-adds of an image."""
    shape = (1, config.image_size, config.image_size, config.channels)
    image = jax.ShapeDtypeStruct(shape, jnp.float32)
    model = jax.eval_shape(lambda: make_coatnet(config).init(0, image))
    with with_groups():
        traced = jax.make_jaxpr(lambda model, image: model(image))(model, image)
    params = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    return params / 1e6, flops(traced.jaxpr.eqns) / 2e9


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(*case, marks=pytest.mark.thorough if number else ())
        for number, case in enumerate(PUBLISHED)
    ],
)
def test_parameters_and_multiply_adds_are_the_papers(name: str, size: int):
    params, adds = PUBLISHED[name, size]
    config = coatnet_config(name, image_size=size, stride_in="widen")
    found = counted(config)
    assert found[0] == pytest.approx(params, rel=0.01)
    assert found[1] == pytest.approx(adds, rel=0.02)


def test_stride_in_the_depthwise_convolution_costs_multiply_adds_not_parameters():
    params, adds = counted(coatnet_config("coatnet-0", stride_in="widen"))
    others = counted(coatnet_config("coatnet-0"))
    assert others[0] == params
    # Two matmuls, of 64 x 384 and 96 x 768, at four times as many places.
    more = 0.75 * (64 * 384 * 112**2 + 96 * 768 * 56**2) / 1e9
    assert others[1] - adds == pytest.approx(more, rel=1e-4)


def test_tiny_is_small():
    params, adds = counted(COATNET_PRESETS["coatnet-tiny"])
    assert params < 0.6
    assert adds < 0.011


def test_field_of_a_preset_is_replaced():
    assert coatnet_config("coatnet-1", num_classes=10).num_classes == 10


def test_preset_or_field_that_there_is_not_raises():
    with pytest.raises(ValueError, match=r"name='coatnet-5' must be one of 'coatnet-t"):
        coatnet_config("coatnet-5")
    with pytest.raises(ValueError, match=r"depth=3 is not a field .* mean 'depths'"):
        coatnet_config("coatnet-0", depth=3)
