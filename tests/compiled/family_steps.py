"""What is compiled: a step of each family of models, for 64 H200s that are not here.

Runs in the process that has the compilers; arguments and results travel as pickles.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxpar
from jaxpar import models
from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.models.experts.config import ExpertsConfig
from jaxpar.planner.absent_devices import gpu_devices

VOCAB, WIDTH, LENGTH = 8192, 768, 256
_TOKENS = {"vocab_size": VOCAB, "width": WIDTH, "num_heads": 12, "remat": "full"}
_LLAMA = {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu"}


@dataclasses.dataclass(frozen=True)
class FamilyStep:
    """What a step of a family holds and sends over each axis, and what it should.

    Attributes:
      state_bytes: of a device.
      communicated: axes -> kind of collective -> bytes of unsharded arrays.
      closed_state_bytes: the closed form of `state_bytes`.
      closed: the closed form of `communicated`, without kinds below 1 % of the largest.
    """

    state_bytes: int
    communicated: Mapping[str, Mapping[str, int]]
    closed_state_bytes: int
    closed: Mapping[str, Mapping[str, int]]


def compile_family(
    name: str, zero: int, others: tuple[tuple[str, int], ...]
) -> FamilyStep:
    """Compile a family's step with bf16 and AdamW, and read what it sends.

    Args:
      name: a key of `_FAMILIES`.
      zero: the stage.
      others: the mesh's axes but data, which has what is left of 64 devices.
    """
    axes = dict(others)
    mesh = make_mesh(MeshShape(data=-1, **axes), gpu_devices("h200", 8, 8))
    model, loss_fn, rows_of = _FAMILIES[name]()
    accumulate = axes.get("pipe", 1)
    engine = jaxpar.initialize(
        model=model,
        loss_fn=loss_fn,
        optimizer=optax.adamw(1e-3),
        sample_batch={
            key: jax.ShapeDtypeStruct((128 * accumulate, *shape), dtype)
            for key, (shape, dtype) in rows_of.items()
        },
        mesh=mesh,
        zero=zero,
        precision="bf16",
        accumulate=accumulate,
    )
    closed = engine.closed_form_budget()
    found = engine.verify()
    least = max(n for kinds in closed.communicated.values() for n in kinds.values())
    return FamilyStep(
        found.state_bytes,
        found.communicated,
        closed.state_bytes,
        {
            over: {kind: n for kind, n in kinds.items() if n > least / 100}
            for over, kinds in closed.communicated.items()
        },
    )


def _tokens(**lengths: int) -> dict[str, Any]:
    return {name: ((length,), jnp.int32) for name, length in lengths.items()}


_IMAGES = {"image": ((224, 224, 3), jnp.float32), "label": ((), jnp.int32)}


def _decoder(**fields: Any) -> tuple[Any, Any, dict[str, Any]]:
    shape = {**_TOKENS, **_LLAMA, "num_layers": 4, "seq_len": LENGTH}
    config = models.DecoderConfig(**shape, **fields)
    rows_of = _tokens(tokens=LENGTH + 1)
    return models.make_decoder(config), models.decoder_loss, rows_of


def _bert() -> tuple[Any, Any, dict[str, Any]]:
    shape = {**_TOKENS, "num_layers": 6, "seq_len": LENGTH}
    config = models.BertConfig(**shape, task="masked")
    rows_of = _tokens(tokens=LENGTH, labels=LENGTH)
    return models.make_bert(config), models.make_bert_loss(config), rows_of


def _t5() -> tuple[Any, Any, dict[str, Any]]:
    model = models.make_t5(models.T5Config(**_TOKENS, num_layers=4))
    return model, models.t5_loss, _tokens(inputs=LENGTH, labels=LENGTH // 2)


def _vit(name: str) -> tuple[Any, Any, dict[str, Any]]:
    config = models.vit_config(name, num_layers=4, remat="full")
    return models.make_vit(config), models.classification_loss, _IMAGES


def _coatnet() -> tuple[Any, Any, dict[str, Any]]:
    config = models.coatnet_config("coatnet-0", norm="group")
    return models.make_coatnet(config), models.classification_loss, _IMAGES


_FAMILIES: dict[str, Any] = {
    "llama": lambda: _decoder(num_kv_heads=4, tied_embedding=False),
    "experts": lambda: _decoder(experts=ExpertsConfig(num=8)),
    "capacity": lambda: _decoder(experts=ExpertsConfig(num=8, capacity_factor=1.25)),
    "bert": _bert,
    "t5": _t5,
    "vit": lambda: _vit("vit-b16"),
    "v-moe": lambda: _vit("v-moe-b16"),
    "coatnet": _coatnet,
}
