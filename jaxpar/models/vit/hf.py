"""Which published ViTs can be read and written, and of which tensors is each leaf made?

A ViT of Hugging Face classifies its class token. A folder without a classifier, or one
with another number of labels, gives a model whose classifier is drawn anew.
"""

from collections.abc import Collection, Iterator
from typing import Any

from jaxpar.models.classification import classification_loss
from jaxpar.models.hf.families import Family, Published, require
from jaxpar.models.hf.leaves import MATRIX, Leaf, one, per_layer
from jaxpar.models.vit.config import VitConfig, num_params
from jaxpar.models.vit.model import make_vit

_ACTIVATIONS = {
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
}
_PREFIX, _LAYER = "vit.", "encoder.layer.{}."
_PATCH = "embeddings.patch_embeddings.projection"
_CLASSIFIER = "classifier."
_PATCH_AXES = (2, 3, 1, 0)
"""Of a kernel [row, column, channel, feature] in a tensor [feature, channel, ...]."""

_LINEARS = {
    "attention/query": "attention.attention.query",
    "attention/key": "attention.attention.key",
    "attention/value": "attention.attention.value",
    "attention/output": "attention.output.dense",
    "mlp/up": "intermediate.dense",
    "mlp/down": "output.dense",
}
_PROJECTIONS = ("attention/query", "attention/key", "attention/value")
_NORMS = {"attention_norm": "layernorm_before", "mlp_norm": "layernorm_after"}


def read_vit(hf: Published) -> dict[str, Any]:
    """The fields of a ViT."""
    require(hf, "hidden_act", *_ACTIVATIONS)
    has_bias = hf.get("qkv_bias", True)
    return {
        "image_size": _side(hf, "image_size"),
        "patch_size": _side(hf, "patch_size"),
        "channels": hf.get("num_channels", 3),
        "num_labels": _num_labels(hf),
        "num_layers": hf["num_hidden_layers"],
        "num_heads": hf["num_attention_heads"],
        "width": hf["hidden_size"],
        "mlp_width": hf["intermediate_size"],
        "norm_epsilon": hf.get("layer_norm_eps", 1e-12),
        "activation": _ACTIVATIONS[hf.get("hidden_act", "gelu")],
        "qkv_bias": has_bias,
        "key_bias": has_bias,
    }


def leaves_of(
    config: VitConfig, hf: Published, names: Collection[str] = ()
) -> dict[str, Leaf]:
    """The leaves of a ViT.

    Args:
      config: of the ViT.
      hf: the published config.
      names: the tensors that there are; a model without a classifier leaves out the
        first part of names.

    Returns:
      Path of a parameter -> what it is made of.

    Raises:
      ValueError: if the ViT has no class token, has experts, patches that overlap, or
        not a bias of keys as of queries: there is none such of theirs.
    """
    if config.pooling != "class_token":
        raise ValueError(
            f"VitConfig: pooling={config.pooling!r} is not known to transformers: its "
            "ViTs classify a class token; use pooling='class_token'."
        )
    if config.stride != config.patch_size:
        raise ValueError(
            f"VitConfig: patch_stride={config.stride} is not known to transformers, "
            f"whose patches don't overlap; use patch_size={config.patch_size} or None."
        )
    if config.key_bias != config.qkv_bias:
        raise ValueError(
            f"VitConfig: key_bias={config.key_bias} with qkv_bias={config.qkv_bias} is "
            "not known to transformers, whose queries, keys and values all have a bias "
            "or none; make both the same."
        )
    if config.experts.num:
        raise ValueError(
            f"VitConfig: experts.num={config.experts.num} is not known to "
            "transformers, whose ViTs have none; use experts.num=0."
        )
    has_prefix = not names or any(name.startswith(_PREFIX) for name in names)
    prefix = _PREFIX if has_prefix else ""
    found = dict(_ends(prefix))
    for ours, theirs in _LINEARS.items():
        name, layers = f"{prefix}{_LAYER}{theirs}", range(config.num_layers)
        found[f"blocks/{ours}/kernel"] = per_layer(f"{name}.weight", layers, MATRIX)
        if config.qkv_bias or ours not in _PROJECTIONS:
            found[f"blocks/{ours}/bias"] = per_layer(f"{name}.bias", layers)
    for ours, theirs in _NORMS.items():
        name, layers = f"{prefix}{_LAYER}{theirs}", range(config.num_layers)
        found[f"blocks/{ours}/scale"] = per_layer(f"{name}.weight", layers)
        found[f"blocks/{ours}/bias"] = per_layer(f"{name}.bias", layers)
    return found


def describe(config: VitConfig, hf: Published) -> Published:
    """The published config of a ViT that was given another number of labels."""
    if config.num_labels == _num_labels(hf):
        return hf
    names = {str(label): f"LABEL_{label}" for label in range(config.num_labels)}
    numbers = {name: int(label) for label, name in names.items()}
    kept = {name: x for name, x in hf.items() if name != "num_labels"}
    return {**kept, "id2label": names, "label2id": numbers}


VITS = {
    "vit": Family(
        read_fields=read_vit,
        config=VitConfig,
        make_model=make_vit,
        loss_fn=lambda config: classification_loss,
        leaves=leaves_of,
        num_params=num_params,
        heads=(_CLASSIFIER, "vit.pooler.", "pooler."),
        head_sizes=("num_labels",),
        describe=describe,
    )
}
"""By model_type."""


def _ends(prefix: str) -> Iterator[tuple[str, Leaf]]:
    embeddings = f"{prefix}embeddings"
    yield "embed/class_token", one(f"{embeddings}.cls_token", ones=2)
    yield "embed/positions", one(f"{embeddings}.position_embeddings", ones=1)
    yield "embed/patch/kernel", one(f"{prefix}{_PATCH}.weight", _PATCH_AXES)
    yield "embed/patch/bias", one(f"{prefix}{_PATCH}.bias")
    yield "head/final_norm/scale", one(f"{prefix}layernorm.weight")
    yield "head/final_norm/bias", one(f"{prefix}layernorm.bias")
    yield "head/classifier/kernel", one(f"{_CLASSIFIER}weight", MATRIX)
    yield "head/classifier/bias", one(f"{_CLASSIFIER}bias")


def _side(hf: Published, field: str) -> int:
    """Height and width, which must be equal."""
    value = hf[field]
    sides = {value} if isinstance(value, int) else {*value}
    if len(sides) != 1:
        raise ValueError(
            f"{hf['model_type']}: {field}={value!r} is not known here; images and "
            "patches whose height and width are equal are."
        )
    return sides.pop()


def _num_labels(hf: Published) -> int:
    """Without names of labels there are two, as transformers has it."""
    names = hf.get("id2label")
    return hf.get("num_labels", 2) if names is None else len(names)
