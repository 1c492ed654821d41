"""Do decoders with the parts of published families train on any mesh as on one device?

SGD with momentum: of parameters that barely move a loss, such as the scales of Gemma's
norms, Adam makes full steps of rounding noise. Losses to 1e-6 and parameters to 1e-5,
relative, over three steps: scales that begin at zero are nothing but gradients, through
norms of updates that begin small.
"""

import functools
from typing import Any

import optax
import pytest

from jaxpar.models.rotary import RotaryScaling
from tests.equivalence import problems
from tests.equivalence.looped_gpt import train

FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": {
        "num_layers": 4,
        "norm": "rmsnorm_plus_one",
        "activation": "geglu",
        "post_norm": True,
        "qk_norm": "heads",
        "bias": False,
        "head_width": 8,
        "num_heads": 4,
        "num_kv_heads": 2,
        "window": 5,
        "global_every": 2,
        "local_rotary_base": 1000.0,
        "rotary_scaling": RotaryScaling(kind="linear", factor=4.0),
        "attention_scale": 0.4,
        "attention_softcap": 5.0,
        "logits_softcap": 3.0,
        "embedding_scale": 32**0.5,
    },
    "qwen2": {
        "bias": False,
        "qkv_bias": True,
        "key_bias": True,
        "num_heads": 4,
        "num_kv_heads": 2,
        "tied_embedding": False,
        "norm_epsilon": 1e-6,
        "num_layers": 4,
    },
    "last-blocks": {"window": 3, "global_every": 3, "num_layers": 4, "num_heads": 4},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma-zero3-tensor2": ("gemma", {"zero": 3, "data": 2, "tensor": 2}),
    "gemma-pipe2-tensor2": (
        "gemma",
        {"data": 2, "pipe": 2, "tensor": 2, "accumulate": 2, "remat": "full"},
    ),
    "gemma-sequence": (
        "gemma",
        {"zero": 1, "tensor": 2, "data": 2, "sequence_parallel": True},
    ),
    "qwen2-zero2-tensor2": ("qwen2", {"zero": 2, "tensor": 2, "data": 2}),
    "qwen2-zero3-ahead-halves": (
        "qwen2",
        {
            "zero": 3,
            "tensor": 2,
            "data": 2,
            "prefetch": True,
            "two_batch_overlap": True,
        },
    ),
    "qwen2-pipe2": ("qwen2", {"data": 2, "pipe": 2, "accumulate": 2}),
    "last-blocks-zero3": ("last-blocks", {"zero": 3, "remat": "full"}),
    "last-blocks-tensor4": ("last-blocks", {"zero": 0, "data": 1, "tensor": 4}),
}
SGD = optax.sgd(0.3, momentum=0.9)
QUICK = ("gemma-pipe2-tensor2",)


@functools.cache
def on_one_device(family: str, accumulate: int) -> Any:
    own = {**FAMILIES[family], "optimizer": SGD}
    return train(data=1, accumulate=accumulate, **own)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough)
        for name in CASES
    ],
)
def test_any_mesh_trains_as_one_device_does(name: str) -> None:
    family, case = CASES[name]
    right = on_one_device(family, case.get("accumulate", 1))
    losses, params = train(**{**FAMILIES[family], "optimizer": SGD, **case})
    assert losses == pytest.approx(right[0], rel=1e-6)
    assert problems.distance(params, right[1]) <= 1e-5
