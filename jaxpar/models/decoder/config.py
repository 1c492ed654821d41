"""What does a decoder's config contain, and which values are valid?"""

import dataclasses
import math
from typing import Literal, NamedTuple

from jaxpar.model.remat import check_policy
from jaxpar.models.experts.config import (
    NO_EXPERTS,
    ExpertsConfig,
    num_expert_params,
)
from jaxpar.models.lora import NO_LORA, LoraConfig, num_adapter_params
from jaxpar.models.mlp import ACTIVATIONS, is_gated
from jaxpar.models.rotary import RotaryScaling
from jaxpar.sparse_attention import SparsityPattern
from jaxpar.tree import near_match

ACTIVATION_NAMES = ("qkv", "attention", "mlp_hidden")
"""Labels of a block's activations, for ``remat="save-names"``."""

_CHOICES = {
    "activation": ACTIVATIONS,
    "norm": ("layernorm", "rmsnorm", "rmsnorm_plus_one"),
    "positions": ("learned", "rotary"),
    "qk_norm": ("heads", "width"),
    "attention": ("auto", "xla", "cudnn", "blocked"),
}


_AT_LEAST_ONE = (
    *("vocab_size", "num_tokens", "seq_len", "num_layers", "num_heads", "num_kv_heads"),
    *("width", "head_width", "mlp_width", "window"),
)
_ABOVE_ZERO = (
    *("norm_epsilon", "attention_scale", "attention_softcap"),
    *("logits_softcap", "embedding_scale"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The shape of a decoder, and how its layers are run.

    Attributes:
      vocab_size: tokens; make it a multiple of the tensor axis.
      num_tokens: those that there are, where vocab_size is rounded up: the others are
        never predicted, and have no share in the loss. None for all.
      seq_len: tokens of a training sequence; the number of learned positions.
      num_layers: blocks.
      num_heads: query heads.
      num_kv_heads: key and value heads, each shared by num_heads / num_kv_heads
        query heads; None for num_heads.
      width: features of the residual stream.
      head_width: features of a head; None for width / num_heads.
      mlp_width: features inside the MLP; None for 4 x width, and for 8/3 x width,
        rounded up to a multiple of 64, if it is gated.
      activation: one of `jaxpar.models.mlp.ACTIVATIONS`.
      norm: "layernorm", "rmsnorm", or "rmsnorm_plus_one", which scales by one plus its
        parameter.
      norm_epsilon: added to the variance, or the mean square.
      post_norm: whether the updates of the residual stream are normalised too.
      qk_norm: "heads" normalises each query head and key head, "width" all heads of a
        token together; None for neither.
      bias: whether the output projections, MLPs and layer norms have a bias.
      qkv_bias: whether queries and values have one; None for `bias`.
      key_bias: whether keys have one. Without rotary positions it has no gradient but
        rounding noise, of which Adam makes full steps; published GPT-2 has it.
      positions: "learned" or "rotary".
      rotary_base: of the wavelengths of rotary positions; 500,000 in Llama 3.
      rotary_scaling: how wavelengths are stretched; None for not at all.
      window: tokens that a query sees, itself among them; None for all before it.
      global_every: of so many blocks, the last sees all tokens; None for none of them.
      local_rotary_base: of the blocks with a window; None for `rotary_base` and its
        scaling.
      attention_scale: of the scores; None for 1 / sqrt(head size).
      attention_softcap: bound of the scores
        (`jaxpar.models.blocked_attention.Scoring`).
      logits_softcap: bound of the logits, likewise.
      embedding_scale: embeddings are multiplied by it; None for 1.
      tied_embedding: whether the head is the transposed embedding table.
      experts: those that replace the MLPs, if there are any.
      lora: low-rank adapters of the blocks' matmuls, if there are any.
      dropout: fraction of features zeroed after the embedding and in each update of
        the residual stream.
      remat: one of `jaxpar.model.remat.REMAT_POLICIES`, applied to each block.
      remat_names: labels to save, of `ACTIVATION_NAMES`, for "save-names" and
        "offload".
      unroll: blocks per iteration of the loop over them, on one stage; num_layers
        removes the loop.
      sequence_parallel: between blocks, shard activations over tokens on the tensor
        axis.
      attention: "auto", "xla", "cudnn" or "blocked" (see `jaxpar.models.attention`); or
        a unidirectional pattern of `jaxpar.sparse_attention`, of num_heads heads.
      logits_dtype: of the logits that the loss is computed from, a chunk at a time;
        None for the dtype that the model computes in. Statistics are in fp32.

    Raises:
      ValueError: if a number is out of range, or a word is not one of its choices.

    Example:
      >>> DecoderConfig(num_layers=2, num_heads=4, width=64).head_size
      16
    """

    vocab_size: int = 256
    num_tokens: int | None = None
    seq_len: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    width: int = 128
    head_width: int | None = None
    mlp_width: int | None = None
    activation: str = "gelu"
    norm: str = "layernorm"
    norm_epsilon: float = 1e-5
    post_norm: bool = False
    qk_norm: str | None = None
    bias: bool = True
    qkv_bias: bool | None = None
    key_bias: bool = False
    positions: str = "learned"
    rotary_base: float = 10_000.0
    rotary_scaling: RotaryScaling | None = None
    window: int | None = None
    global_every: int | None = None
    local_rotary_base: float | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    embedding_scale: float | None = None
    tied_embedding: bool = True
    experts: ExpertsConfig = NO_EXPERTS
    lora: LoraConfig = NO_LORA
    dropout: float = 0.0
    remat: str = "none"
    remat_names: tuple[str, ...] = ()
    unroll: int = 1
    sequence_parallel: bool = False
    attention: str | SparsityPattern = "auto"
    logits_dtype: Literal["float32", "bfloat16"] | None = None

    def __post_init__(self):
        self._check_numbers()
        self._check_heads()
        self._check_window()
        self._check_experts()
        for field, choices in _CHOICES.items():
            value = getattr(self, field)
            if isinstance(value, str):
                _check_choice(field, value, choices)
        if not isinstance(self.attention, str):
            self._check_pattern(self.attention)
        check_policy(self.remat, self.remat_names)
        for name in self.remat_names:
            _check_choice("remat_names", name, ACTIVATION_NAMES)

    def _check_numbers(self) -> None:
        for field in _AT_LEAST_ONE:
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"DecoderConfig: {field}={value} must be at least 1.")
        for field in _ABOVE_ZERO:
            value = getattr(self, field)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"DecoderConfig: {field}={value} must be above 0.")
        for field in ("rotary_base", "local_rotary_base"):
            value = getattr(self, field)
            if value is not None and not value > 1:
                raise ValueError(
                    f"DecoderConfig: {field}={value} must be above 1, such as 10,000."
                )
        if (self.num_tokens or 0) > self.vocab_size:
            raise ValueError(
                f"DecoderConfig: num_tokens={self.num_tokens} must be at most "
                f"vocab_size={self.vocab_size}, the rows of the embedding."
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"DecoderConfig: dropout={self.dropout} must be at least 0 and below "
                "1; it is the fraction that is zeroed."
            )
        if not 1 <= self.unroll <= self.num_layers:
            raise ValueError(
                f"DecoderConfig: unroll={self.unroll} must be between 1 and "
                f"num_layers={self.num_layers}, which unrolls the scan fully."
            )

    def _check_heads(self) -> None:
        if self.head_width is None and self.width % self.num_heads:
            raise ValueError(
                f"DecoderConfig: width={self.width} must be a multiple of "
                f"num_heads={self.num_heads} (the nearest is "
                f"{max(1, round(self.width / self.num_heads)) * self.num_heads}), or "
                "head_width given."
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"DecoderConfig: num_heads={self.num_heads} must be a multiple of "
                f"num_kv_heads={self.kv_heads}; every key head serves the same number "
                "of query heads."
            )
        if self.positions == "rotary" and self.head_size % 2:
            raise ValueError(
                f"DecoderConfig: positions='rotary' rotates pairs of features, but "
                f"heads have {self.head_size} (head_width, or width={self.width} / "
                f"num_heads={self.num_heads}); make that even, or use "
                "positions='learned'."
            )

    def _check_window(self) -> None:
        for field in ("global_every", "local_rotary_base"):
            if getattr(self, field) is not None and self.window is None:
                raise ValueError(
                    f"DecoderConfig: {field}={getattr(self, field)} is of blocks with "
                    "a window, but window=None; give the window's tokens."
                )
        if self.window is not None and not isinstance(self.attention, str):
            raise ValueError(
                f"DecoderConfig: window={self.window} and a sparsity pattern as "
                "attention both say what a query sees; give one of them."
            )
        if not self.global_every:
            return
        if not 2 <= self.global_every <= self.num_layers:
            raise ValueError(
                f"DecoderConfig: global_every={self.global_every} must be from 2 to "
                f"num_layers={self.num_layers}; for blocks that all see everything "
                "leave window out."
            )

    def _check_experts(self) -> None:
        every = self.experts.every
        if self.experts.num and every > self.num_layers:
            raise ValueError(
                f"DecoderConfig: experts.every={every} must be at most "
                f"num_layers={self.num_layers}; no block has experts otherwise."
            )

    def _check_pattern(self, pattern: SparsityPattern) -> None:
        kind = type(pattern).__name__
        if pattern.num_heads != self.num_heads:
            raise ValueError(
                f"DecoderConfig: attention={kind}(num_heads={pattern.num_heads}), but "
                f"the model has num_heads={self.num_heads}; give the pattern as many."
            )
        if pattern.attention != "unidirectional":
            raise ValueError(
                f"DecoderConfig: attention={kind}(attention={pattern.attention!r}) "
                "sees the tokens that a GPT should predict; give it "
                "attention='unidirectional'."
            )

    @property
    def group_size(self) -> int:
        """Blocks after which the kinds of blocks repeat."""
        every = self.experts.every if self.experts.num else 1
        return math.lcm(self.global_every or 1, every)

    @property
    def num_expert_layers(self) -> int:
        """Blocks with experts."""
        return self.num_layers // self.experts.every if self.experts.num else 0

    @property
    def head_size(self) -> int:
        """Features per head, with None resolved."""
        return self.head_width or self.width // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Key and value heads, with None resolved."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def has_qkv_bias(self) -> bool:
        """Whether queries and values have a bias, with None resolved."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def hidden_width(self) -> int:
        """Features inside the MLP, with None resolved."""
        if self.mlp_width is not None:
            return self.mlp_width
        if not is_gated(self.activation):
            return 4 * self.width
        return -(-8 * self.width // (3 * 64)) * 64


class BlockKind(NamedTuple):
    """What distinguishes the blocks of one decoder.

    Attributes:
      is_local: whether queries see a window only.
      has_experts: whether experts replace the MLP.
    """

    is_local: bool
    has_experts: bool


def block_kind(config: DecoderConfig, place: int) -> BlockKind:
    """The kind of a decoder's block.

    Args:
      config: the shape of the model.
      place: of the block, from 1.
    """
    is_global = bool(config.global_every) and place % (config.global_every or 1) == 0
    is_local = config.window is not None and not is_global
    has_experts = bool(config.experts.num) and place % config.experts.every == 0
    return BlockKind(is_local, has_experts)


def num_params(config: DecoderConfig) -> int:
    """Count a model's parameters in closed form.

    Args:
      config: the shape of the model.

    Returns:
      The number of parameters, shared ones once.

    Example:
      >>> num_params(DecoderConfig(num_layers=1, num_heads=1, width=8, seq_len=4))
      2960
    """
    width, hidden = config.width, config.hidden_width
    q_width, kv_width = (
        heads * config.head_size for heads in (config.num_heads, config.kv_heads)
    )
    norm = width * (2 if config.norm == "layernorm" and config.bias else 1)
    norms = norm * (4 if config.post_norm else 2)
    if config.qk_norm is not None:
        is_whole = config.qk_norm == "width"
        norms += q_width + kv_width if is_whole else 2 * config.head_size
    gated = is_gated(config.activation)
    num_up = 2 if gated else 1
    products = 2 * width * (q_width + kv_width)
    mlp = (num_up + 1) * width * hidden
    mlp += num_up * hidden + width if config.bias else 0
    biases = width if config.bias else 0
    biases += q_width + kv_width if config.has_qkv_bias else 0
    biases += kv_width if config.key_bias else 0
    rows = config.vocab_size * (1 if config.tied_embedding else 2)
    rows += config.seq_len if config.positions == "learned" else 0
    experts = num_expert_params(
        *(config.experts, width, config.experts.width or hidden),
        gated=gated,
        bias=config.bias,
    )
    mlps = (config.num_layers - config.num_expert_layers) * mlp
    mlps += config.num_expert_layers * experts
    mlps += _num_adapter_params(config, q_width, kv_width)
    return config.num_layers * (products + biases + norms) + mlps + rows * width + norm


def _num_adapter_params(config: DecoderConfig, q_width: int, kv_width: int) -> int:
    width, hidden = config.width, config.hidden_width
    shapes = {
        "query": (width, q_width),
        "key": (width, kv_width),
        "value": (width, kv_width),
        "output": (q_width, width),
    }
    mlp = {"up": (width, hidden), "down": (hidden, width)}
    mlp |= {"gate": (width, hidden)} if is_gated(config.activation) else {}
    targets, num_experts = config.lora.targets, config.num_expert_layers

    def total(known: dict[str, tuple[int, int]]) -> int:
        own = [shape for name, shape in known.items() if name in targets]
        return num_adapter_params(config.lora, own)

    found = config.num_layers * total(shapes)
    found += (config.num_layers - num_experts) * total(mlp)
    shared = config.experts.shared_width
    if shared is not None:
        found += num_experts * total(dict.fromkeys(mlp, (width, shared)))
    return found


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value in choices:
        return
    raise ValueError(
        f"DecoderConfig: {field}={value!r} must be one of "
        f"{', '.join(map(repr, choices))}.{near_match(value, choices)}"
    )
