"""How are published T5 read and written: their fields, and the tensors of each leaf?"""

from collections.abc import Collection
from typing import Any

from jaxpar.models.hf.families import Family, Published, require
from jaxpar.models.hf.leaves import MATRIX, Leaf, one, per_layer
from jaxpar.models.t5.config import T5Config, num_params
from jaxpar.models.t5.loss import START, t5_loss
from jaxpar.models.t5.model import make_t5

_TABLES = (
    "shared.weight",
    "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
)
"""Names of the one embedding table; files have one of them or several."""

_IGNORED = "EncDecAttention.relative_attention_bias.weight"
"""In older files, though nothing reads it."""

_ACTIVATIONS = {"relu": "relu", "gated-gelu": "geglu"}
_PROJECTIONS = {"query": "q", "key": "k", "value": "v", "output": "o"}


def read_t5(hf: Published) -> dict[str, Any]:
    """The fields of a T5.

    Args:
      hf: the published config. Its ``tie_word_embeddings`` is false for an untied head;
        version 5 of transformers writes ``scale_decoder_outputs`` in its place.
    """
    require(hf, "feed_forward_proj", *_ACTIVATIONS)
    require(hf, "pad_token_id", START)
    require(hf, "decoder_start_token_id", START, None)
    is_tied = hf.get("tie_word_embeddings") is not False
    return {
        "vocab_size": hf["vocab_size"],
        "num_layers": hf["num_layers"],
        "num_decoder_layers": hf.get("num_decoder_layers"),
        "num_heads": hf["num_heads"],
        "width": hf["d_model"],
        "head_width": hf["d_kv"],
        "mlp_width": hf["d_ff"],
        "activation": _ACTIVATIONS[hf.get("feed_forward_proj", "relu")],
        "num_buckets": hf.get("relative_attention_num_buckets", 32),
        "max_distance": hf.get("relative_attention_max_distance", 128),
        "norm_epsilon": hf.get("layer_norm_epsilon", 1e-6),
        "tied_embedding": hf.get("scale_decoder_outputs", is_tied),
    }


def leaves_of(
    config: T5Config, hf: Published, names: Collection[str] = ()
) -> dict[str, Leaf]:
    """The leaves of a T5.

    Args:
      config: of the model.
      hf: the published config.
      names: the tensors that there are; none for those that are written.

    Returns:
      Path of a parameter -> what it is made of.
    """
    del hf
    table = next((name for name in _TABLES if name in names), _TABLES[0])
    found = {"embed/embedding/table": one(table, padded=0)}
    first = "{}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    for stack, part in (("encoder", "between"), ("decoder", "head")):
        found[f"embed/{stack}_bias"] = one(first.format(stack))
        found[f"{part}/final_norm/scale"] = one(f"{stack}.final_layer_norm.weight")
    if not config.tied_embedding:
        found["head/logits/kernel"] = one("lm_head.weight", MATRIX, padded=1)
    found |= _stack(config, "encoder", config.num_layers, ("attention", "mlp"))
    parts = ("attention", "cross", "mlp")
    return found | _stack(config, "decoder", config.decoder_layers, parts)


def is_parameter(name: str) -> bool:
    """Whether a tensor of a file is one, that is not there under another name too."""
    return name not in _TABLES and not name.endswith(_IGNORED)


def _stack(
    config: T5Config, stack: str, count: int, parts: tuple[str, ...]
) -> dict[str, Leaf]:
    """The leaves of the blocks of a stack, which are `parts` in their order."""
    gated = {"gate": "wi_0", "up": "wi_1", "down": "wo"}
    mlp = gated if config.activation == "geglu" else {"up": "wi", "down": "wo"}
    modules = {
        "attention": ("attention", "SelfAttention", _PROJECTIONS),
        "cross": ("cross_attention", "EncDecAttention", _PROJECTIONS),
        "mlp": ("mlp", "DenseReluDense", mlp),
    }
    found = {}
    for number, part in enumerate(parts):
        at = f"{stack}.block.{{}}.layer.{number}"
        norm = per_layer(f"{at}.layer_norm.weight", range(count))
        found[f"{stack}/{part}_norm/scale"] = norm
        ours, theirs, kernels = modules[part]
        for own, name in kernels.items():
            template = f"{at}.{theirs}.{name}.weight"
            leaf = per_layer(template, range(count), MATRIX)
            found[f"{stack}/{ours}/{own}/kernel"] = leaf
    return found


T5_FAMILY = Family(
    read_fields=read_t5,
    config=T5Config,
    make_model=make_t5,
    loss_fn=lambda config: t5_loss,
    leaves=leaves_of,
    num_params=num_params,
    is_parameter=is_parameter,
)
"""Models of the type "t5"."""
