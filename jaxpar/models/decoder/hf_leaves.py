"""Which tensors of a published decoder is each leaf made of?"""

from collections.abc import Collection, Iterator, Sequence

from jaxpar.models.decoder.config import DecoderConfig, block_kind
from jaxpar.models.hf.families import Published
from jaxpar.models.hf.leaves import MATRIX, Leaf, Stack, TensorPart, one, per_layer

_PROJECTIONS = ("query", "key", "value")
_IGNORED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Ends of the names of tensors that are no parameters."""

_OF_EXPERTS = (0, 2, 1)
"""Axes of kernels [E, in, out] in a tensor [E, out, in]."""


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
    is_gpt2 = model_type == "gpt2"
    block = _gpt2_block(config) if is_gpt2 else _block(config)
    mlp = {} if is_gpt2 else _mlp("layers.{}.mlp")
    for section, layers in _sections(config).items():
        own = dict(block)
        if block_kind(config, layers[0] + 1).has_experts:
            experts = _experts(config, layers, model_type, prefix, names)
            found |= {f"{section}/mlp/{path}": leaf for path, leaf in experts.items()}
        else:
            own |= {f"mlp/{path}": how for path, how in mlp.items()}
        for path, (template, how) in own.items():
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
    size, count = config.group_size, config.num_layers
    if size == 1:
        return {"blocks": range(count)}
    whole = count - count % size
    found: dict[str, Sequence[int]] = {
        f"blocks/layers/{place}": range(place, whole, size)
        for place in range(size if whole else 0)
    }
    last = range(whole, count)
    if len({block_kind(config, layer + 1) for layer in last}) == 1:
        return {**found, "last_blocks": last}
    each = {f"last_blocks_{layer - whole + 1}": [layer] for layer in last}
    return {**found, **each}


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


def _mlp(at: str) -> dict[str, tuple[str, dict]]:
    """As `_block`, of an MLP whose names begin so."""
    parts = ("gate", "up", "down")
    return {f"{x}/kernel": (f"{at}.{x}_proj.weight", {"axes": MATRIX}) for x in parts}


def _experts(
    config: DecoderConfig,
    layers: Sequence[int],
    model_type: str,
    prefix: str,
    names: Collection[str],
) -> dict[str, Leaf]:
    """Path in a block -> what it is made of, of the experts of some layers.

    Published files have a tensor for each expert; version 5 of transformers may write
    those of a layer as one, gate and up side by side.
    """
    is_fused = any(name.endswith("experts.gate_up_proj") for name in names)
    is_mixtral = model_type == "mixtral" and not is_fused
    at = f"{prefix}layers.{{}}.{'block_sparse_moe' if is_mixtral else 'mlp'}"
    found = {"router/kernel": per_layer(f"{at}.gate.weight", layers, MATRIX)}
    if is_fused:
        fused = f"{at}.experts.gate_up_proj"
        for number, ours in enumerate(("gate", "up")):
            found[ours] = per_layer(fused, layers, _OF_EXPERTS, (number, 2), 1)
        found["down"] = per_layer(f"{at}.experts.down_proj", layers, _OF_EXPERTS)
    else:
        found |= _each_expert(f"{at}.experts", config.experts.num, layers, is_mixtral)
    if config.experts.shared_width is not None:
        for path, (name, how) in _mlp(f"{at}.shared_expert").items():
            found[f"shared/{path}"] = per_layer(name, layers, **how)
    if config.experts.shared_gate:
        name = f"{at}.shared_expert_gate.weight"
        found["shared_gate/kernel"] = per_layer(name, layers, MATRIX)
    return found


def _each_expert(
    at: str, num_experts: int, layers: Sequence[int], is_mixtral: bool
) -> dict[str, Leaf]:
    """Kernels of which each expert has a tensor of its own."""
    theirs = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    if is_mixtral:
        theirs = {"gate": "w1", "up": "w3", "down": "w2"}
    found = {}
    for ours, own in theirs.items():
        names = (
            [f"{at.format(layer)}.{e}.{own}.weight" for e in range(num_experts)]
            for layer in layers
        )
        stacks = (Stack(tuple(TensorPart(x, MATRIX) for x in each)) for each in names)
        found[ours] = Leaf(Stack(tuple(stacks)))
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
