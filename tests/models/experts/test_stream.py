"""Do statistics of routers pass through all blocks, and reach the loss?"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.models.classification import classification_loss, classification_metrics
from jaxpar.models.experts.config import NO_EXPERTS, ExpertsConfig
from jaxpar.models.experts.stream import begin, router_losses, run_block, stream_of
from jaxpar.models.vit.config import VitConfig, num_params
from jaxpar.models.vit.model import VitBlock, make_vit

EXPERTS = ExpertsConfig(num=4, every=2, balance_loss=0.5, router_z_loss=0.25)
CONFIG = VitConfig(
    image_size=8,
    patch_size=4,
    channels=2,
    num_labels=5,
    num_layers=4,
    num_heads=2,
    width=12,
    experts=EXPERTS,
)
IMAGES = jax.random.normal(jax.random.key(0), (3, 8, 8, 2))
BATCH = {"image": IMAGES, "label": jnp.array([0, 4, 2])}


def random_vit(config: VitConfig) -> Any:
    model = make_vit(config).init(0, IMAGES)
    rng = np.random.default_rng(1)
    moved = [
        leaf + 0.3 * rng.normal(size=leaf.shape).astype(np.float32)
        for leaf in jax.tree.leaves(model.params)
    ]
    return model.with_params(
        jax.tree.unflatten(jax.tree.structure(model.params), moved)
    )


def test_blocks_with_experts_add_their_statistics_and_others_none():
    blocks = [
        VitBlock(CONFIG, has_experts=has, rngs=nnx.Rngs(seed))
        for seed, has in enumerate((False, True, True))
    ]
    hidden: Any = begin(jax.random.normal(jax.random.key(1), (2, 5, 12)), EXPERTS)
    alone = []
    for block in blocks:
        x_BTD = hidden["x"]
        hidden = run_block(block, hidden)
        own: Any = run_block(block, begin(x_BTD, EXPERTS))
        np.testing.assert_array_equal(own["x"], hidden["x"])
        alone.append(own["router"])
    assert not alone[0].any()
    assert (alone[1] != alone[2]).any()
    np.testing.assert_allclose(hidden["router"], sum(alone), rtol=1e-6)
    found = router_losses(hidden, EXPERTS, 2)
    assert found is not None
    balance, router_z, *_ = np.asarray(hidden["router"][0] / 2).tolist()
    assert found.loss == pytest.approx(0.5 * balance + 0.25 * router_z, rel=1e-6)
    assert found.metrics["router_balance"] == pytest.approx(balance)


def test_stream_without_experts_is_all_there_is():
    block = VitBlock(CONFIG, rngs=nnx.Rngs(0))
    x_BTD = begin(jnp.ones((2, 5, 12)), NO_EXPERTS)
    found = run_block(block, x_BTD)
    assert stream_of(found) is found
    assert router_losses(found, NO_EXPERTS, 0) is None


def test_experts_that_are_all_the_mlp_compute_what_it_does():
    model = random_vit(dataclasses.replace(CONFIG, experts=NO_EXPERTS))
    mixed = make_vit(dataclasses.replace(CONFIG, experts=ExpertsConfig(num=4)))
    mixed = mixed.init(0, IMAGES)
    mlp, params = model.params["blocks"]["mlp"], jax.tree.map(jnp.copy, model.params)
    same = {f"{name}_bias": mlp[name]["bias"] for name in mlp}
    same |= {name: mlp[name]["kernel"] for name in mlp}
    repeated = {k: jnp.repeat(x[:, None], 4, axis=1) for k, x in same.items()}
    router = mixed.params["blocks"]["mlp"]["router"]
    params["blocks"]["mlp"] = {**repeated, "router": router}
    logits, router = mixed.with_params(params)(IMAGES)
    np.testing.assert_allclose(logits, model(IMAGES), rtol=1e-4, atol=1e-5)
    assert router.metrics["dropped_tokens"] == 0


def test_loss_of_a_classifier_has_what_its_routers_add():
    model = random_vit(CONFIG)
    logits, router = model(IMAGES)
    loss, metrics = classification_loss(model, BATCH)
    plain = classification_loss(lambda image_BHWC: logits, BATCH)
    assert float(router.loss) > 0.5
    mean = float(loss.total / loss.weight)
    assert mean == pytest.approx(float(plain.total) / 3 + float(router.loss), rel=1e-6)
    assert metrics["largest_expert_load"] == router.metrics["largest_expert_load"]
    evaluated, _ = classification_metrics(model, BATCH)
    assert evaluated.total == pytest.approx(float(plain.total), rel=1e-6)


def test_parameters_are_those_of_the_closed_form():
    model = make_vit(CONFIG).init(0, IMAGES)
    sizes = [x.size for x in jax.tree.leaves(model.params)]
    assert sum(sizes) == num_params(CONFIG)


def test_groups_of_blocks_must_be_alike():
    with pytest.raises(ValueError, match=r"num_layers=4 must be a multiple of experts"):
        dataclasses.replace(CONFIG, experts=ExpertsConfig(num=4, every=3))
