"""Which tensors of a published BERT is each leaf made of?"""

from collections.abc import Collection, Iterator

from jaxpar.models.bert.config import BertConfig
from jaxpar.models.hf.families import Published
from jaxpar.models.hf.leaves import MATRIX, Leaf, one, per_layer
from jaxpar.models.mlp import is_gated

HEADS = ("cls.", "classifier.", "bert.pooler.", "pooler.")
"""How the names of a task's tensors begin; some tasks have no pooler."""

_MATMULS = {
    "attention/query": "attention.self.query",
    "attention/key": "attention.self.key",
    "attention/value": "attention.self.value",
    "attention/output": "attention.output.dense",
    "mlp/up": "intermediate.dense",
    "mlp/down": "output.dense",
}
_NORMS = {"attention_norm": "attention.output", "mlp_norm": "output"}


def bert_leaves(
    config: BertConfig, hf: Published, names: Collection[str] = ()
) -> dict[str, Leaf]:
    """The leaves of a BERT.

    Args:
      config: of the model.
      hf: the published config.
      names: the tensors that there are. Files of a BERT without a head leave out the
        first part of names, and the oldest call a norm's scale gamma.

    Returns:
      Path of a parameter -> what it is made of.

    Raises:
      ValueError: if the config has what no published BERT has.
    """
    if is_gated(config.activation):
        raise ValueError(
            f"{hf['model_type']}: activation={config.activation!r} has a gate, for "
            "which published models have no tensor."
        )
    is_bare = names and not any(name.startswith("bert.") for name in names)
    body = "" if is_bare else "bert."
    is_old = any(name.endswith("LayerNorm.gamma") for name in names)
    norm = {"scale": "gamma", "bias": "beta"} if is_old else {"scale": "weight"}
    found = dict(_embed(body, norm))
    layers, at = range(config.num_layers), f"{body}encoder.layer.{{}}."
    for path, own in _MATMULS.items():
        kernel = f"{at}{own}.weight"
        found[f"blocks/{path}/kernel"] = per_layer(kernel, layers, MATRIX)
        found[f"blocks/{path}/bias"] = per_layer(f"{at}{own}.bias", layers)
    for path, own in _NORMS.items():
        for ours in ("scale", "bias"):
            name = f"{at}{own}.LayerNorm.{norm.get(ours, ours)}"
            found[f"blocks/{path}/{ours}"] = per_layer(name, layers)
    return {**found, **_head(config, body, norm, names)}


def is_bert_parameter(name: str) -> bool:
    """Whether a tensor of a file is one."""
    return not name.endswith(".position_ids")


def _embed(body: str, norm: dict[str, str]) -> Iterator[tuple[str, Leaf]]:
    at = f"{body}embeddings."
    yield "embed/embedding/table", one(f"{at}word_embeddings.weight", padded=0)
    yield "embed/positions/table", one(f"{at}position_embeddings.weight")
    yield "embed/types/table", one(f"{at}token_type_embeddings.weight")
    yield from _norm("embed/norm", f"{at}LayerNorm", norm)


def _head(
    config: BertConfig, body: str, norm: dict[str, str], names: Collection[str]
) -> dict[str, Leaf]:
    """The leaves of the task's head."""
    found: list[tuple[str, Leaf]] = []
    if config.has_pooler:
        found += _dense("head/pooler/dense", f"{body}pooler.dense")
    if config.predicts_words:
        words = "cls.predictions."
        found += _dense("head/words/dense", f"{words}transform.dense")
        found += _norm("head/words/norm", f"{words}transform.LayerNorm", norm)
        bias, other = f"{words}bias", f"{words}decoder.bias"
        is_other = other in names and bias not in names
        found += [("head/words/bias", one(other if is_other else bias, padded=0))]
    if config.task == "pretraining":
        found += _dense("head/sentence", "cls.seq_relationship")
    if not config.predicts_words:
        found += _dense("head/classifier", "classifier")
    return dict(found)


def _dense(path: str, name: str) -> Iterator[tuple[str, Leaf]]:
    yield f"{path}/kernel", one(f"{name}.weight", MATRIX)
    yield f"{path}/bias", one(f"{name}.bias")


def _norm(path: str, name: str, norm: dict[str, str]) -> Iterator[tuple[str, Leaf]]:
    for ours in ("scale", "bias"):
        yield f"{path}/{ours}", one(f"{name}.{norm.get(ours, ours)}")
