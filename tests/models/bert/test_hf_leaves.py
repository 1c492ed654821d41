"""Which tensors is a BERT's leaf made of?"""

import pytest

from jaxpar.models.bert.config import BertConfig
from jaxpar.models.bert.hf_leaves import bert_leaves, is_bert_parameter

HF = {"model_type": "bert"}
CONFIG = BertConfig(num_layers=2)


def test_layers_are_in_order():
    leaf = bert_leaves(CONFIG, HF)["blocks/mlp/down/kernel"]
    assert [part.name for part in leaf.piece.parts()] == [
        f"bert.encoder.layer.{i}.output.dense.weight" for i in range(2)
    ]


def test_a_bare_model_leaves_out_the_first_part_of_names():
    found = bert_leaves(CONFIG, HF, ["embeddings.LayerNorm.gamma", "pooler.dense.bias"])
    assert found["embed/embedding/table"].name == "embeddings.word_embeddings.weight"
    assert found["head/pooler/dense/kernel"].name == "pooler.dense.weight"
    assert found["embed/norm/scale"].name == "embeddings.LayerNorm.gamma"
    assert found["embed/norm/bias"].name == "embeddings.LayerNorm.beta"


def test_the_bias_of_words_has_two_names():
    def name(*names: str) -> str:
        return bert_leaves(CONFIG, HF, ["bert.x", *names])["head/words/bias"].name

    bias, other = "cls.predictions.bias", "cls.predictions.decoder.bias"
    assert name() == name(bias) == name(bias, other) == bias
    assert name(other) == other


def test_buffers_are_not_parameters():
    assert not is_bert_parameter("bert.embeddings.position_ids")
    assert is_bert_parameter("bert.embeddings.position_embeddings.weight")


def test_a_gate_has_no_published_tensor():
    config = BertConfig(activation="swiglu", task="tokens")
    with pytest.raises(ValueError, match="activation='swiglu' has a gate"):
        bert_leaves(config, HF)
