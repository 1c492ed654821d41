"""Is a published BERT's config read, and written for another task?"""

from typing import Any

import pytest

from jaxpar.models.bert.config import BertConfig
from jaxpar.models.bert.hf_config import ARCHITECTURES, describe_bert
from jaxpar.models.bert.hf_families import BERTS

HF: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}


def read(hf: dict[str, Any], **overrides: Any) -> BertConfig:
    return BERTS["bert"].read_config(hf, **overrides)


def test_fields_are_read():
    fields = {"layer_norm_eps": 1e-5, "hidden_act": "gelu_new", "type_vocab_size": 3}
    assert read({**HF, **fields}) == BertConfig(
        vocab_size=64,
        seq_len=16,
        type_vocab_size=3,
        num_layers=3,
        num_heads=4,
        width=32,
        mlp_width=48,
        norm_epsilon=1e-5,
        activation="gelu",
        task="masked",
    )
    assert read(HF).activation == "gelu_exact"


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_class_says_the_task(kind: str):
    assert read({**HF, "architectures": [kind]}).task == ARCHITECTURES[kind]


@pytest.mark.parametrize("change", [{"architectures": None}, {}])
def test_a_class_without_a_task_needs_one(change: dict[str, Any]):
    hf = {**HF, "architectures": ["BertModel"], **change}
    with pytest.raises(ValueError, match="task='BertModel' must be one of 'pretrain"):
        read(hf)
    assert read(hf, task="sequence").task == "sequence"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("position_embedding_type", "relative_key"),
        ("is_decoder", True),
        ("tie_word_embeddings", False),
        ("problem_type", "multi_label_classification"),
        ("hidden_act", "silu"),
    ],
)
def test_what_is_not_known_is_named(field: str, value: Any):
    with pytest.raises(ValueError, match=f"bert: {field}={value!r} is not known"):
        read({**HF, field: value})


def test_classes_are_counted_by_their_names():
    names = {"0": "no", "1": "yes", "2": "perhaps"}
    hf = {**HF, "architectures": ["BertForTokenClassification"], "id2label": names}
    assert read(hf).num_labels == 3
    assert describe_bert(read(hf), hf) == hf


def test_another_task_is_described():
    found = describe_bert(read(HF, task="sequence", num_labels=3), HF)
    assert found["architectures"] == ["BertForSequenceClassification"]
    assert found["id2label"] == {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}
    assert found["label2id"]["LABEL_2"] == 2
    assert "id2label" not in describe_bert(read(HF), HF)
