"""Which tensors is a leaf made of?"""

from jaxpar.models.decoder.config import DecoderConfig
from jaxpar.models.decoder.hf_leaves import is_parameter, leaves_of

WINDOWS = DecoderConfig(
    num_layers=7,
    window=4,
    global_every=3,
    positions="rotary",
    norm="rmsnorm",
    activation="swiglu",
    bias=False,
)


def names(config: DecoderConfig, model_type: str, path: str) -> list[str]:
    leaf = leaves_of(config, {"model_type": model_type})[path]
    return [part.name for part in leaf.piece.parts()]


def test_blocks_in_groups_have_every_so_many_layers() -> None:
    def layers(section: str) -> list[str]:
        found = names(WINDOWS, "gemma3_text", f"{section}/mlp/up/kernel")
        return [name.split(".")[2] for name in found]

    assert layers("blocks/layers/0") == ["0", "3"]
    assert layers("blocks/layers/2") == ["2", "5"]
    assert layers("last_blocks") == ["6"]


def test_older_files_leave_out_the_first_part_of_names() -> None:
    config, gpt2 = DecoderConfig(num_layers=1, key_bias=True), {"model_type": "gpt2"}
    old = leaves_of(config, gpt2, ["wte.weight", "h.0.attn.c_attn.weight"])
    assert old["embed/embedding/table"].name == "wte.weight"
    new = leaves_of(config, gpt2, ["transformer.wte.weight"])
    assert new["embed/embedding/table"].name == "transformer.wte.weight"


def test_buffers_are_no_parameters() -> None:
    assert not is_parameter("h.0.attn.bias")
    assert not is_parameter("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert is_parameter("h.0.attn.c_attn.bias")
