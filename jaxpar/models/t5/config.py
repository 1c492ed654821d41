"""What does a T5's config contain, and which values are valid?"""

import dataclasses
import math
from typing import Literal

from jaxpar.model.remat import check_policy
from jaxpar.models.decoder.config import ACTIVATION_NAMES
from jaxpar.models.mlp import ACTIVATIONS, is_gated
from jaxpar.models.t5.relative_bias import DistanceBuckets
from jaxpar.tree import near_match

_CHOICES = {"activation": ACTIVATIONS, "attention": ("auto", "xla", "blocked")}
_AT_LEAST_ONE = (
    *("vocab_size", "num_layers", "num_decoder_layers", "num_heads"),
    *("width", "head_width", "mlp_width"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config:
    """The shape of a T5, and how its layers are run.

    Attributes:
      vocab_size: tokens; make it a multiple of the tensor axis.
      num_layers: blocks of the encoder.
      num_decoder_layers: blocks of the decoder; None for num_layers.
      num_heads: of each attention; make it a multiple of the tensor axis.
      width: features of the residual streams.
      head_width: features of a head; None for width / num_heads.
      mlp_width: features inside the MLP; None for 4 x width, and for 8/3 x width,
        rounded up to a multiple of 64, if it is gated.
      activation: one of `jaxpar.models.mlp.ACTIVATIONS`: "geglu" in T5 1.1, "relu" in
        the first T5.
      num_buckets: of relative positions, each with a bias for each head.
      max_distance: tokens from which on all distances share a bucket.
      norm_epsilon: added to the mean square.
      tied_embedding: whether the head is the transposed embedding table, as in the
        first T5: the residual stream is then divided by sqrt(width) before it.
      dropout: fraction of features zeroed after the embedding, in each update of the
        residual streams, and behind the last norm of each stack.
      remat: one of `jaxpar.model.remat.REMAT_POLICIES`, applied to each block.
      remat_names: labels to save, of "qkv", "attention" and "mlp_hidden", for
        "save-names" and "offload".
      unroll: blocks per iteration of the loop over those of a stack, on one stage.
      sequence_parallel: between blocks, shard activations over tokens on the tensor
        axis, which must divide the tokens of both sides.
      attention: "auto", "xla" or "blocked" (see `jaxpar.models.attend`).
      logits_dtype: of the logits that the loss is computed from, a chunk at a time;
        None for the dtype that the model computes in. Statistics are in fp32.

    Raises:
      ValueError: if a number is out of range, or a word is not one of its choices.

    Example:
      >>> T5Config(num_layers=2, num_heads=4, width=64).decoder_layers
      2
    """

    vocab_size: int = 512
    num_layers: int = 4
    num_decoder_layers: int | None = None
    num_heads: int = 4
    width: int = 128
    head_width: int | None = None
    mlp_width: int | None = None
    activation: str = "geglu"
    num_buckets: int = 32
    max_distance: int = 128
    norm_epsilon: float = 1e-6
    tied_embedding: bool = False
    dropout: float = 0.0
    remat: str = "none"
    remat_names: tuple[str, ...] = ()
    unroll: int = 1
    sequence_parallel: bool = False
    attention: str = "auto"
    logits_dtype: Literal["float32", "bfloat16"] | None = None

    def __post_init__(self):
        self._check_numbers()
        self._check_buckets()
        if self.head_width is None and self.width % self.num_heads:
            nearest = max(1, round(self.width / self.num_heads)) * self.num_heads
            raise ValueError(
                f"T5Config: width={self.width} must be a multiple of "
                f"num_heads={self.num_heads} (the nearest is {nearest}), or "
                "head_width given."
            )
        for field, choices in _CHOICES.items():
            _check_choice(field, getattr(self, field), choices)
        check_policy(self.remat, self.remat_names)
        for name in self.remat_names:
            _check_choice("remat_names", name, ACTIVATION_NAMES)

    def _check_numbers(self) -> None:
        for field in _AT_LEAST_ONE:
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"T5Config: {field}={value} must be at least 1.")
        if not 0 < self.norm_epsilon < math.inf:
            raise ValueError(
                f"T5Config: norm_epsilon={self.norm_epsilon} must be above 0."
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"T5Config: dropout={self.dropout} must be at least 0 and below 1; it "
                "is the fraction that is zeroed."
            )
        most = max(self.num_layers, self.decoder_layers)
        if not 1 <= self.unroll <= most:
            raise ValueError(
                f"T5Config: unroll={self.unroll} must be between 1 and {most}, the "
                "blocks of the longer stack, which removes the loops."
            )

    def _check_buckets(self) -> None:
        if self.num_buckets < 4 or self.num_buckets % 2:
            raise ValueError(
                f"T5Config: num_buckets={self.num_buckets} must be even and at least "
                "4: the encoder has half of them for each direction; T5's is 32."
            )
        if self.max_distance <= self.num_buckets // 2:
            raise ValueError(
                f"T5Config: max_distance={self.max_distance} must be above "
                f"{self.num_buckets // 2}, half of num_buckets={self.num_buckets}: "
                "smaller distances have a bucket each."
            )

    @property
    def decoder_layers(self) -> int:
        """Blocks of the decoder, with None resolved."""
        return self.num_decoder_layers or self.num_layers

    @property
    def head_size(self) -> int:
        """Features per head, with None resolved."""
        return self.head_width or self.width // self.num_heads

    @property
    def hidden_width(self) -> int:
        """Features inside the MLP, with None resolved."""
        if self.mlp_width is not None:
            return self.mlp_width
        if not is_gated(self.activation):
            return 4 * self.width
        return -(-8 * self.width // (3 * 64)) * 64

    def buckets(self, *, causal: bool) -> DistanceBuckets:
        """The buckets of relative positions of a stack."""
        return DistanceBuckets(self.num_buckets, self.max_distance, causal=causal)


def num_params(config: T5Config) -> int:
    """Count a model's parameters in closed form.

    Args:
      config: the shape of the model.

    Returns:
      The number of parameters, shared ones once.

    Example:
      >>> num_params(T5Config(num_layers=1, num_heads=1, width=8, vocab_size=16))
      4216
    """
    width = config.width
    attention = 4 * width * config.num_heads * config.head_size
    num_products = 3 if is_gated(config.activation) else 2
    mlp = num_products * width * config.hidden_width
    encoder = config.num_layers * (attention + mlp + 2 * width) + width
    decoder = config.decoder_layers * (2 * attention + mlp + 3 * width) + width
    biases = 2 * config.num_buckets * config.num_heads
    tables = (1 if config.tied_embedding else 2) * config.vocab_size * width
    return encoder + decoder + biases + tables


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value in choices:
        return
    raise ValueError(
        f"T5Config: {field}={value!r} must be one of "
        f"{', '.join(map(repr, choices))}.{near_match(value, choices)}"
    )
