"""What does a BERT's config contain, and which values are valid?"""

import dataclasses
import math
from typing import Literal

from jaxpar.model.remat import check_policy
from jaxpar.models.mlp import ACTIVATIONS, is_gated
from jaxpar.sparse_attention import SparsityPattern
from jaxpar.tree import near_match

TASKS = ("pretraining", "masked", "sequence", "tokens")
"""What a BERT is trained for."""

ACTIVATION_NAMES = ("qkv", "attention", "mlp_hidden")
"""Labels of a block's activations, for ``remat="save-names"``."""

_CHOICES = {
    "activation": ACTIVATIONS,
    "attention": ("auto", "xla", "cudnn", "blocked"),
    "task": TASKS,
}
_AT_LEAST_ONE = (
    *("vocab_size", "seq_len", "type_vocab_size", "num_layers", "num_heads"),
    *("width", "mlp_width"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertConfig:
    """The shape of a BERT, its task, and how its layers are run.

    Attributes:
      vocab_size: words; make it a multiple of the tensor axis.
      seq_len: tokens of a row; the number of learned positions.
      type_vocab_size: types of tokens, such as those of a first and a second sentence.
      num_layers: blocks.
      num_heads: heads of attention.
      width: features of the residual stream.
      mlp_width: features inside the MLP; None for 4 x width.
      norm_epsilon: added to the variance.
      activation: one of `jaxpar.models.mlp.ACTIVATIONS`, of the MLP and, if it has no
        gate, of the masked words' head.
      dropout: fraction of features zeroed after the embedding, in each update of the
        residual stream and before a classifier. Attention's probabilities are kept.
      task: "pretraining" predicts masked words and whether the second sentence follows
        the first; "masked" only the words; "sequence" classifies rows, and "tokens"
        each token.
      num_labels: classes of "sequence" and "tokens".
      remat: one of `jaxpar.model.remat.REMAT_POLICIES`, applied to each block.
      remat_names: labels to save, of `ACTIVATION_NAMES`, for "save-names" and
        "offload".
      unroll: blocks per iteration of the loop over them, on one stage; num_layers
        removes the loop.
      sequence_parallel: between blocks, shard activations over tokens on the tensor
        axis.
      attention: "auto", "xla", "cudnn" or "blocked" (see `jaxpar.models.attention`); or
        a bidirectional pattern of `jaxpar.sparse_attention`, of num_heads heads.
      logits_dtype: of the words' logits that the loss is computed from, a chunk at a
        time; None for the dtype that the model computes in. Statistics are in fp32.

    Raises:
      ValueError: if a number is out of range, or a word is not one of its choices.

    Example:
      >>> BertConfig(num_layers=2, num_heads=4, width=64).hidden_width
      256
    """

    vocab_size: int = 30_522
    seq_len: int = 512
    type_vocab_size: int = 2
    num_layers: int = 12
    num_heads: int = 12
    width: int = 768
    mlp_width: int | None = None
    norm_epsilon: float = 1e-12
    activation: str = "gelu_exact"
    dropout: float = 0.0
    task: str = "pretraining"
    num_labels: int = 2
    remat: str = "none"
    remat_names: tuple[str, ...] = ()
    unroll: int = 1
    sequence_parallel: bool = False
    attention: str | SparsityPattern = "auto"
    logits_dtype: Literal["float32", "bfloat16"] | None = None

    def __post_init__(self):
        self._check_numbers()
        for field, choices in _CHOICES.items():
            value = getattr(self, field)
            if isinstance(value, str):
                _check_choice(field, value, choices)
        if is_gated(self.activation) and self.predicts_words:
            raise ValueError(
                f"BertConfig: activation={self.activation!r} has a gate, but the head "
                f"of task={self.task!r} has one matmul before it; use 'gelu_exact'."
            )
        if not isinstance(self.attention, str):
            self._check_pattern(self.attention)
        check_policy(self.remat, self.remat_names)
        for name in self.remat_names:
            _check_choice("remat_names", name, ACTIVATION_NAMES)

    def _check_numbers(self) -> None:
        for field in _AT_LEAST_ONE:
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"BertConfig: {field}={value} must be at least 1.")
        if not 0 < self.norm_epsilon < math.inf:
            raise ValueError(
                f"BertConfig: norm_epsilon={self.norm_epsilon} must be above 0."
            )
        if self.num_labels < 2:
            raise ValueError(
                f"BertConfig: num_labels={self.num_labels} must be at least 2, the "
                "classes to choose from; regression has another loss."
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"BertConfig: dropout={self.dropout} must be at least 0 and below 1; "
                "it is the fraction that is zeroed."
            )
        if not 1 <= self.unroll <= self.num_layers:
            raise ValueError(
                f"BertConfig: unroll={self.unroll} must be between 1 and "
                f"num_layers={self.num_layers}, which unrolls the scan fully."
            )
        if self.width % self.num_heads:
            nearest = max(1, round(self.width / self.num_heads)) * self.num_heads
            raise ValueError(
                f"BertConfig: width={self.width} must be a multiple of "
                f"num_heads={self.num_heads} (the nearest is {nearest})."
            )

    def _check_pattern(self, pattern: SparsityPattern) -> None:
        kind = type(pattern).__name__
        if pattern.num_heads != self.num_heads:
            raise ValueError(
                f"BertConfig: attention={kind}(num_heads={pattern.num_heads}), but "
                f"the model has num_heads={self.num_heads}; give the pattern as many."
            )
        if pattern.attention != "bidirectional":
            raise ValueError(
                f"BertConfig: attention={kind}(attention={pattern.attention!r}) hides "
                "the tokens behind each token, which a BERT sees; give it "
                "attention='bidirectional'."
            )

    @property
    def head_size(self) -> int:
        """Features per head."""
        return self.width // self.num_heads

    @property
    def hidden_width(self) -> int:
        """Features inside the MLP, with None resolved."""
        return 4 * self.width if self.mlp_width is None else self.mlp_width

    @property
    def predicts_words(self) -> bool:
        """Whether the task has masked words."""
        return self.task in ("pretraining", "masked")

    @property
    def has_pooler(self) -> bool:
        """Whether the task reads a whole row, from its first token."""
        return self.task in ("pretraining", "sequence")


def num_bert_params(config: BertConfig) -> int:
    """Count a BERT's parameters in closed form, those of its task's head among them.

    Args:
      config: the shape of the model.

    Returns:
      The number of parameters, the shared table once.

    Example:
      >>> num_bert_params(BertConfig())
      110106428
    """
    width, hidden = config.width, config.hidden_width
    rows = config.vocab_size + config.seq_len + config.type_vocab_size
    norm, square = 2 * width, width * width + width
    num_up = 2 if is_gated(config.activation) else 1
    mlp = (num_up + 1) * width * hidden + num_up * hidden + width
    count = rows * width + norm + config.num_layers * (4 * square + mlp + 2 * norm)
    count += square if config.has_pooler else 0
    count += square + norm + config.vocab_size if config.predicts_words else 0
    classes = {"masked": 0, "pretraining": 2}.get(config.task, config.num_labels)
    return count + classes * (width + 1)


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value in choices:
        return
    raise ValueError(
        f"BertConfig: {field}={value!r} must be one of "
        f"{', '.join(map(repr, choices))}.{near_match(value, choices)}"
    )
