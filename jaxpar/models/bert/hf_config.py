"""Which BERT does a published config describe, and how is ours described?"""

from typing import Any

from jaxpar.models.bert.config import BertConfig
from jaxpar.models.hf.families import Published, require

_ACTIVATIONS = {"gelu": "gelu_exact", "gelu_new": "gelu", "relu": "relu"}

ARCHITECTURES = {
    "BertForPreTraining": "pretraining",
    "BertForMaskedLM": "masked",
    "BertForSequenceClassification": "sequence",
    "BertForTokenClassification": "tokens",
}
"""The published class -> the task."""


def read_bert(hf: Published) -> dict[str, Any]:
    """The fields of a BERT.

    Args:
      hf: the published config. A class that has no task here is given as the task,
        which `BertConfig` refuses by name unless another replaces it.
    """
    require(hf, "hidden_act", *_ACTIVATIONS)
    require(hf, "position_embedding_type", "absolute")
    require(hf, "is_decoder", False)
    require(hf, "add_cross_attention", False)
    require(hf, "tie_word_embeddings", True)
    require(hf, "problem_type", None, "single_label_classification")
    (kind, *_) = hf.get("architectures") or ["BertModel"]
    return {
        "vocab_size": hf["vocab_size"],
        "seq_len": hf["max_position_embeddings"],
        "type_vocab_size": hf.get("type_vocab_size", 2),
        "num_layers": hf["num_hidden_layers"],
        "num_heads": hf["num_attention_heads"],
        "width": hf["hidden_size"],
        "mlp_width": hf["intermediate_size"],
        "norm_epsilon": hf.get("layer_norm_eps", 1e-12),
        "activation": _ACTIVATIONS[hf.get("hidden_act", "gelu")],
        "task": ARCHITECTURES.get(kind, kind),
        "num_labels": _num_labels(hf),
    }


def describe_bert(config: BertConfig, hf: Published) -> Published:
    """The published config of a BERT whose task may be another than it was read with.

    Args:
      config: of the model that is written.
      hf: the published config that it was read from.

    Returns:
      That, with the class of the task, and names for its classes if their number has
      changed.
    """
    (kind,) = (kind for kind, task in ARCHITECTURES.items() if task == config.task)
    found = {**hf, "architectures": [kind]}
    if not config.predicts_words and config.num_labels != _num_labels(hf):
        names = [f"LABEL_{i}" for i in range(config.num_labels)]
        found["id2label"] = {str(i): name for i, name in enumerate(names)}
        found["label2id"] = {name: i for i, name in enumerate(names)}
    return found


def _num_labels(hf: Published) -> int:
    return len(hf["id2label"]) if "id2label" in hf else hf.get("num_labels", 2)
