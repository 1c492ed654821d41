"""Do adapters begin as nothing, add what they say, and train alone?"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder, num_params
from jaxpar.models.experts.config import ExpertsConfig
from jaxpar.models.layers import Linear
from jaxpar.models.lora import TARGETS, LoraConfig, LowRank
from jaxpar.tree import named_leaves

TOKENS = np.random.default_rng(0).integers(0, 64, (8, 9)).astype(np.int32)
LORA = LoraConfig(rank=4, alpha=8.0, targets=TARGETS)
CONFIG = DecoderConfig(
    vocab_size=64,
    seq_len=8,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    width=32,
    activation="swiglu",
    norm="rmsnorm",
    positions="rotary",
    bias=False,
    lora=LORA,
)


def test_an_adapter_adds_a_scaled_product_of_two():
    linear = Linear((6, 5), ("embed", "mlp"), rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 6)), jnp.float32)
    before = linear(x)
    linear.adapter = LowRank((6, 5), ("embed", "mlp"), LORA, rngs=nnx.Rngs(1))
    np.testing.assert_array_equal(linear(x), before)
    linear.adapter.b[...] = jnp.ones((4, 5))
    added = 2.0 * x @ linear.adapter.a[...] @ jnp.ones((4, 5))
    np.testing.assert_allclose(linear(x), before + added, rtol=1e-5)
    stabilised = LoraConfig(rank=4, alpha=8.0, rank_stabilised=True)
    assert stabilised.scale == 4.0


@pytest.mark.parametrize("experts", [0, 4])
def test_every_target_has_one_and_the_closed_form_counts_them(experts: int):
    mixture = ExpertsConfig(num=experts, every=2, shared_width=16)
    config = DecoderConfig(**{**vars(CONFIG), "experts": mixture})
    model = make_decoder(config).init(0, TOKENS)
    leaves = named_leaves(model.params)
    assert sum(x.size for x in leaves.values()) == num_params(config)
    adapted = {name.split("/")[-3] for name in leaves if "/adapter/" in name}
    assert adapted == set(TARGETS)


def train(shape: jaxpar.MeshShape, **how) -> tuple[list[float], dict]:
    engine = jaxpar.initialize(
        model=make_decoder(CONFIG),
        loss_fn=decoder_loss,
        optimizer=optax.sgd(0.5, momentum=0.9),
        sample_batch={"tokens": TOKENS},
        mesh=shape,
        devices=jax.devices()[: shape.num_devices],
        trainable=nnx.LoRAParam,
        check_loss=False,
        **how,
    )
    losses = [float(engine.step({"tokens": TOKENS})["loss"]) for _ in range(4)]
    assert all("/adapter/" in name for name in named_leaves(engine.state.params))
    return losses, jax.device_get(named_leaves(engine.state.params))


@pytest.mark.parametrize(
    ("shape", "how"),
    [
        (jaxpar.MeshShape(data=2, tensor=2), {"zero": 3}),
        pytest.param(
            jaxpar.MeshShape(data=2, pipe=2, tensor=2),
            {"zero": 1, "accumulate": 2},
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_adapters_train_alone_on_any_mesh(shape, how):
    accumulate = how.get("accumulate", 1)
    right = train(jaxpar.MeshShape(data=1), zero=0, accumulate=accumulate)
    found = train(shape, **how)
    assert found[0] == pytest.approx(right[0], rel=1e-6)
    assert right[0][-1] < right[0][0]
    for name, value in right[1].items():
        error = np.linalg.norm(found[1][name] - value)
        assert error <= 1e-5 * np.linalg.norm(value), name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": -1}, "rank=-1 must be at least 0"),
        ({"alpha": 0.0}, "alpha=0.0 must be above 0"),
        ({"targets": ("quary",)}, "targets='quary' must be of .* mean 'query'"),
        ({"rank": 2, "targets": ()}, r"targets=\(\) with rank=2 adapts nothing"),
    ],
)
def test_bad_configs_are_named(fields: dict, message: str):
    with pytest.raises(ValueError, match=message):
        LoraConfig(**fields)
