"""Which parameters are trained: by pattern or by type, and what is refused?"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

from jaxpar.model.bridge import Network, make_network
from jaxpar.model.trainable import trainable_names
from jaxpar.step.inputs import make_inputs
from jaxpar.step.loss import as_losses
from jaxpar.tree import named_leaves

LOSS = as_losses(lambda model, batch: jnp.mean(model(batch["x"])), None)[0]
ROWS = make_inputs({"x": jnp.ones((2, 3))}, jnp.int32(0))


def adapted(rngs: nnx.Rngs) -> nnx.Module:
    base = nnx.Linear(3, 4, rngs=rngs)
    return nnx.LoRA(3, 2, 4, base_module=base, rngs=rngs)


def network_of(model: Any) -> tuple[Network, list[str]]:
    """The network, and its parameters' names."""
    network = make_network(model, LOSS.on_sample, ROWS)
    params, _ = jax.eval_shape(network.init, jax.random.key(0))
    return network, list(named_leaves(params))


def chosen(trainable: Any, model: Any = adapted) -> Sequence[str]:
    network, names = network_of(model)
    return sorted(trainable_names(trainable, names, network))


@pytest.mark.parametrize(
    ("trainable", "right"),
    [
        (["lora_*"], ["lora_a", "lora_b"]),
        (("*/kernel", "lora_a"), ["base_module/kernel", "lora_a"]),
        (nnx.LoRAParam, ["lora_a", "lora_b"]),
        ((nnx.LoRAParam, "*/bias"), ["base_module/bias", "lora_a", "lora_b"]),
    ],
    ids=str,
)
def test_patterns_and_types_choose(trainable, right):
    assert chosen(trainable) == right


def test_everything_is_trained_by_default():
    network, names = network_of(adapted)
    assert trainable_names(None, names, network) == frozenset(names)


@pytest.mark.parametrize(
    ("trainable", "message"),
    [
        ("lora_a", r"trainable='lora_a' must be a list .* pass trainable=\['lora_a'\]"),
        (["lora_c"], r"'lora_c' matches no parameter; known paths: .*lora_[ab]"),
        (["*"], "matches all 4 parameters, so nothing is frozen"),
        (nnx.Param, "matches all 4 parameters"),
        (nnx.BatchStat, "no parameter is a BatchStat; the model's types are LoRAP"),
        ([], "chooses no parameter"),
    ],
    ids=str,
)
def test_patterns_that_match_nothing_or_all_are_refused(trainable, message):
    with pytest.raises(ValueError, match=message):
        chosen(trainable)


@pytest.mark.parametrize("wrong", [nnx.PathContains("head"), [nnx.Param, 3]], ids=str)
def test_what_chooses_nothing_by_path_or_type_is_refused(wrong, unchecked_types):
    message = r"trainable=.* must be path patterns, such as \['\*/lora_a'\], or types"
    with pytest.raises(TypeError, match=message):
        trainable_names(wrong, ["head/kernel", "body/kernel"], None)


def test_linen_has_paths_but_no_types():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return linen.Dense(2)(linen.Dense(4)(x))

    assert chosen(["Dense_1/*"], Net()) == ["Dense_1/bias", "Dense_1/kernel"]
    with pytest.raises(ValueError, match="only the parameters of an NNX module have"):
        chosen(nnx.Param, Net())
