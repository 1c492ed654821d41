"""Which tensors of a published decoder is each leaf made of?"""

from collections.abc import Collection, Iterator, Sequence

from jaxpar.models.decoder.config import DecoderConfig
from jaxpar.models.hf.families import Published
from jaxpar.models.hf.leaves import MATRIX, Leaf, one, per_layer

_PROJECTIONS = ("query", "key", "value")
_IGNORED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Ends of the names of tensors that are no parameters."""


def leaves_of(
    config: DecoderConfig, hf: Published, names: Collection[str] = ()
) -> dict[str, Leaf]:
    """The leaves of a decoder.

    Args:
      config: of the decoder.
      hf: the published config.
      names: the tensors that there are; older files leave out the first part of names.

    Returns:
      Path of a parameter -> what it is made of.
    """
    model_type = hf["model_type"]
    prefix = "transformer." if model_type == "gpt2" else "model."
    if names and not any(name.startswith(prefix) for name in names):
        prefix = ""
    found = dict(_ends(config, model_type, prefix))
    block = _gpt2_block if model_type == "gpt2" else _block
    for section, layers in _sections(config).items():
        for path, (template, how) in block(config).items():
            name = f"{prefix}{template}"
            found[f"{section}/{path}"] = per_layer(name, layers, **how)
    return found


def is_parameter(name: str) -> bool:
    """Whether a tensor of a file is one."""
    return not name.endswith(_IGNORED)


def _ends(
    config: DecoderConfig, model_type: str, prefix: str
) -> Iterator[tuple[str, Leaf]]:
    is_gpt2 = model_type == "gpt2"
    table, norm = ("wte", "ln_f") if is_gpt2 else ("embed_tokens", "norm")
    yield "embed/embedding/table", one(f"{prefix}{table}.weight", padded=0)
    if config.positions == "learned":
        yield "embed/positions/table", one(f"{prefix}wpe.weight")
    yield "head/final_norm/scale", one(f"{prefix}{norm}.weight")
    if config.norm == "layernorm" and config.bias:
        yield "head/final_norm/bias", one(f"{prefix}{norm}.bias")
    if not config.tied_embedding:
        yield "head/logits/kernel", one("lm_head.weight", MATRIX, padded=1)


def _sections(config: DecoderConfig) -> dict[str, Sequence[int]]:
    """Path of a stack of blocks -> its layers, in order."""
    every, count = config.global_every, config.num_layers
    if every is None:
        return {"blocks": range(count)}
    whole = count - count % every
    found: dict[str, Sequence[int]] = {
        f"blocks/layers/{place}": range(place, whole, every) for place in range(every)
    }
    return {**found, "last_blocks": range(whole, count)} if count % every else found


def _block(config: DecoderConfig) -> dict[str, tuple[str, dict]]:
    """Path in a block -> a template of the tensor's name, and how it is read."""
    matrix = {"axes": MATRIX}
    at = "layers.{}."
    found: dict[str, tuple[str, dict]] = {}
    for ours, theirs in zip((*_PROJECTIONS, "output"), "qkvo", strict=True):
        name = f"{at}self_attn.{theirs}_proj"
        found[f"attention/{ours}/kernel"] = (f"{name}.weight", matrix)
        has_bias = {"key": config.key_bias, "output": config.bias}
        if has_bias.get(ours, config.has_qkv_bias):
            found[f"attention/{ours}/bias"] = (f"{name}.bias", {})
    for part in ("gate", "up", "down"):
        found[f"mlp/{part}/kernel"] = (f"{at}mlp.{part}_proj.weight", matrix)
    norms = {"attention_norm": "input", "mlp_norm": "post_attention"}
    if config.post_norm:
        norms |= {"attention_post_norm": "post_attention"}
        norms |= {"mlp_norm": "pre_feedforward", "mlp_post_norm": "post_feedforward"}
    for ours, theirs in norms.items():
        found[f"{ours}/scale"] = (f"{at}{theirs}_layernorm.weight", {})
    if config.qk_norm:
        for ours in ("query", "key"):
            name = f"{at}self_attn.{ours[0]}_norm.weight"
            found[f"attention/{ours}_norm/scale"] = (name, {})
    return found


def _gpt2_block(config: DecoderConfig) -> dict[str, tuple[str, dict]]:
    """As `_block`; kernels are [in, out], queries, keys and values are one."""
    found: dict[str, tuple[str, dict]] = {}
    for number, ours in enumerate(_PROJECTIONS):
        how = {"part": (number, len(_PROJECTIONS))}
        found[f"attention/{ours}/kernel"] = ("h.{}.attn.c_attn.weight", how)
        found[f"attention/{ours}/bias"] = ("h.{}.attn.c_attn.bias", how)
    matmuls = {"attention/output": "attn.c_proj", "mlp/up": "mlp.c_fc"}
    for ours, theirs in {**matmuls, "mlp/down": "mlp.c_proj"}.items():
        found[f"{ours}/kernel"] = (f"h.{{}}.{theirs}.weight", {})
        found[f"{ours}/bias"] = (f"h.{{}}.{theirs}.bias", {})
    for ours, theirs in {"attention_norm": "ln_1", "mlp_norm": "ln_2"}.items():
        found[f"{ours}/scale"] = (f"h.{{}}.{theirs}.weight", {})
        found[f"{ours}/bias"] = (f"h.{{}}.{theirs}.bias", {})
    return found
