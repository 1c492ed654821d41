"""Is a CoAtNet of ours that of timm?

Logits to 1e-4, gradients to 1e-4 of their norm and running statistics to 1e-5, in fp32.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.jaxprs.evaluate import flops
from jaxpar.models.classification import classification_loss
from jaxpar.models.coatnet.config import CoatnetConfig
from jaxpar.models.coatnet.model import make_coatnet
from jaxpar.models.coatnet.presets import coatnet_config
from jaxpar.models.coatnet.timm import read_timm, write_timm
from tests.models.grouped_convolution import with_groups
from tests.models.hf.published_coatnet import (
    CONFIGS,
    PublishedCoatnet,
    publish,
    reload,
    shapes_of_named,
)

published = functools.cache(publish)


def evaluated(config: CoatnetConfig, right: PublishedCoatnet) -> np.ndarray:
    """Our logits in evaluation mode."""
    params, state = read_timm(config, right.tensors)
    model = make_coatnet(config).init(0, right.batch["image"]).with_params(params)
    model.state = state
    return np.asarray(jax.jit(lambda model, x: model(x))(model, right.batch["image"]))


@functools.cache
def trained(name: str) -> tuple[Any, ...]:
    """Our logits, loss, gradients and state of a call in training mode."""
    config, right = CONFIGS[name], published(name)
    network = make_coatnet(config).make_network(classification_loss, right.batch)
    params, state = read_timm(config, right.tensors)

    def loss_of(params: Any, batch: Any) -> tuple[Any, Any]:
        seen = []

        def loss_fn(model: Any, batch: Any) -> Any:
            def call(image: Any) -> Any:
                seen.append(model(image))
                return seen[0]

            return classification_loss(call, batch)

        given = loss_fn, (params, state), jax.random.key(0), batch
        loss, after = network.run(*given, training=True)
        return loss.total / loss.weight, (seen[0], after)

    run = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
    (loss, (logits, after)), grads = jax.device_get(run(params, right.batch))
    return logits, loss, grads, after


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_evaluation_are_theirs(name: str) -> None:
    right = published(name)
    found = evaluated(CONFIGS[name], right)
    assert np.abs(right.evaluated).max() > 0.1
    np.testing.assert_allclose(found, right.evaluated, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_training_is_theirs(name: str) -> None:
    right = published(name)
    logits, loss, grads, after = trained(name)
    np.testing.assert_allclose(logits, right.logits, atol=1e-4)
    assert float(loss) == pytest.approx(right.loss, rel=1e-5)
    tensors = write_timm(CONFIGS[name], grads, after)
    whole = math.sqrt(sum(np.sum(x**2) for x in right.grads.values()))
    for tensor, expected in right.grads.items():
        error = np.linalg.norm(tensors[tensor] - expected)
        most = max(1e-4 * np.linalg.norm(expected), 1e-6 * whole)
        assert error <= most, tensor
    for tensor, expected in right.after.items():
        error = np.linalg.norm(tensors[tensor] - expected)
        assert error <= 1e-5 * np.linalg.norm(expected), tensor


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_written_they_load(name: str) -> None:
    config, right = CONFIGS[name], published(name)
    written = write_timm(config, *read_timm(config, right.tensors))
    assert written.keys() == right.tensors.keys()
    for tensor, expected in right.tensors.items():
        np.testing.assert_array_equal(written[tensor], expected, err_msg=tensor)
    found = reload(config, written, right.batch["image"])
    np.testing.assert_allclose(found, right.evaluated, atol=1e-5)


def test_biases_of_keys_change_no_logits() -> None:
    right = published("small")
    config = dataclasses.replace(CONFIGS["small"], key_bias=False)
    np.testing.assert_allclose(evaluated(config, right), right.evaluated, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "size"), [(f"coatnet-{number}", 224) for number in range(5)]
)
def test_presets_are_theirs(name: str, size: int) -> None:
    shapes, adds = shapes_of_named(f"{name.replace('-', '_')}_224", size)
    config = coatnet_config(name, key_bias=True, image_size=size)
    image = jax.ShapeDtypeStruct((1, size, size, 3), np.float32)
    model = jax.eval_shape(lambda: make_coatnet(config).init(0, image))
    params = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    assert params == sum(math.prod(shape) for shape in shapes.values())
    with with_groups():
        traced = jax.make_jaxpr(lambda model, image: model(image))(model, image)
    assert flops(traced.jaxpr.eqns) / 2e9 == pytest.approx(adds, rel=1e-6)
