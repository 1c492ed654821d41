"""Which published decoders are known?"""

from jaxpar.models.decoder.config import DecoderConfig
from jaxpar.models.decoder.hf_config import READERS
from jaxpar.models.decoder.hf_families import DECODERS
from jaxpar.models.hf.pretrained import FAMILIES


def test_every_reader_belongs_to_a_family() -> None:
    assert DECODERS.keys() == READERS.keys()
    assert DECODERS.keys() <= FAMILIES.keys()
    hf = {"model_type": "gpt2", "vocab_size": 9, "n_positions": 8}
    gpt2 = {**hf, "n_layer": 1, "n_head": 2, "n_embd": 4}
    config = DECODERS["gpt2"].read_config(gpt2, remat="full")
    assert isinstance(config, DecoderConfig)
    assert config.remat == "full"
