"""What does a ViT's config contain, and which values are valid?"""

import dataclasses
import math

from jaxpar.model.remat import check_policy
from jaxpar.models.experts.config import (
    NO_EXPERTS,
    ExpertsConfig,
    num_expert_params,
)
from jaxpar.models.mlp import ACTIVATIONS, is_gated
from jaxpar.tree import near_match

ACTIVATION_NAMES = ("qkv", "attention", "mlp_hidden")
"""Labels of a block's activations, for ``remat="save-names"``."""

_CHOICES = {
    "activation": ACTIVATIONS,
    "pooling": ("class_token", "mean"),
    "attention": ("auto", "xla", "cudnn", "blocked"),
}
_AT_LEAST_ONE = (
    *("image_size", "patch_size", "patch_stride", "channels", "num_layers"),
    *("num_heads", "width", "mlp_width"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VitConfig:
    """The shape of a ViT, and how its layers are run.

    Attributes:
      image_size: height and width of an image, pixels; patches fill it.
      patch_size: height and width of a patch, pixels; each patch is a token.
      patch_stride: pixels from one patch to the next, fewer than its size where patches
        overlap; None for its size.
      channels: of an image: 3 of RGB, 1 of grey.
      num_labels: classes to choose from.
      num_layers: blocks.
      num_heads: heads of attention.
      width: features of the residual stream.
      mlp_width: features inside the MLP; None for 4 x width.
      norm_epsilon: added to the variance.
      activation: one of `jaxpar.models.mlp.ACTIVATIONS`.
      qkv_bias: whether queries and values have a bias.
      key_bias: whether keys have one. It adds the same to all scores of a query, so it
        has no gradient but rounding noise, of which Adam makes full steps; published
        ViTs have it.
      dropout: fraction of features zeroed after the embedding and in each update of
        the residual stream. Attention's probabilities are kept.
      pooling: what is classified: "class_token", a token of its own before the
        patches, or the "mean" of the patches.
      remat: one of `jaxpar.model.remat.REMAT_POLICIES`, applied to each block.
      remat_names: labels to save, of `ACTIVATION_NAMES`, for "save-names" and
        "offload".
      unroll: blocks per iteration of the loop over them, on one stage; num_layers
        removes the loop.
      sequence_parallel: between blocks, shard activations over tokens on the tensor
        axis. Where that does not divide `num_tokens`, as a class token makes likely,
        the last device's share is padded.
      attention: "auto", "xla", "cudnn" or "blocked" (see `jaxpar.models.attention`).
      experts: those that replace the MLPs, if there are any: a V-MoE. Source: Riquelme
        et al., "Scaling Vision with Sparse Mixture of Experts" (2021).

    Raises:
      ValueError: if a number is out of range, or a word is not one of its choices.

    Example:
      >>> VitConfig(image_size=224, patch_size=16).num_tokens
      197
    """

    image_size: int = 224
    patch_size: int = 16
    patch_stride: int | None = None
    channels: int = 3
    num_labels: int = 1000
    num_layers: int = 12
    num_heads: int = 12
    width: int = 768
    mlp_width: int | None = None
    norm_epsilon: float = 1e-6
    activation: str = "gelu_exact"
    qkv_bias: bool = True
    key_bias: bool = False
    dropout: float = 0.0
    pooling: str = "class_token"
    remat: str = "none"
    remat_names: tuple[str, ...] = ()
    unroll: int = 1
    sequence_parallel: bool = False
    attention: str = "auto"
    experts: ExpertsConfig = NO_EXPERTS

    def __post_init__(self):
        self._check_numbers()
        self._check_shapes()
        for field, choices in _CHOICES.items():
            _check_choice(field, getattr(self, field), choices)
        check_policy(self.remat, self.remat_names)
        for name in self.remat_names:
            _check_choice("remat_names", name, ACTIVATION_NAMES)

    def _check_numbers(self) -> None:
        for field in _AT_LEAST_ONE:
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"VitConfig: {field}={value} must be at least 1.")
        if self.num_labels < 2:
            raise ValueError(
                f"VitConfig: num_labels={self.num_labels} must be at least 2, the "
                "classes to choose from."
            )
        if not 0 < self.norm_epsilon < math.inf:
            raise ValueError(
                f"VitConfig: norm_epsilon={self.norm_epsilon} must be above 0."
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"VitConfig: dropout={self.dropout} must be at least 0 and below 1; it "
                "is the fraction that is zeroed."
            )
        if not 1 <= self.unroll <= self.num_layers:
            raise ValueError(
                f"VitConfig: unroll={self.unroll} must be between 1 and "
                f"num_layers={self.num_layers}, which removes the loop."
            )

    def _check_shapes(self) -> None:
        if self.num_layers % self.group_size:
            raise ValueError(
                f"VitConfig: num_layers={self.num_layers} must be a multiple of "
                f"experts.every={self.experts.every}, so that all groups of blocks are "
                "alike."
            )
        size, stride = self.patch_size, self.stride
        if stride > size:
            raise ValueError(
                f"VitConfig: patch_stride={stride} must be at most patch_size={size}, "
                "or pixels between patches would be left out."
            )
        if self.image_size < size or (self.image_size - size) % stride:
            near = size + max(0, round((self.image_size - size) / stride)) * stride
            raise ValueError(
                f"VitConfig: image_size={self.image_size} must be a multiple of "
                f"patch_size={size}, or that size and a multiple of patch_stride="
                f"{stride}, or pixels would be left over; the nearest is {near}."
            )
        if self.width % self.num_heads:
            near = max(1, round(self.width / self.num_heads)) * self.num_heads
            raise ValueError(
                f"VitConfig: width={self.width} must be a multiple of "
                f"num_heads={self.num_heads} (the nearest is {near})."
            )

    @property
    def stride(self) -> int:
        """Pixels from one patch to the next, with None resolved."""
        return self.patch_size if self.patch_stride is None else self.patch_stride

    @property
    def head_size(self) -> int:
        """Features per head."""
        return self.width // self.num_heads

    @property
    def hidden_width(self) -> int:
        """Features inside the MLP, with None resolved."""
        return 4 * self.width if self.mlp_width is None else self.mlp_width

    @property
    def group_size(self) -> int:
        """Blocks of a group, of which the last has experts."""
        return self.experts.every if self.experts.num else 1

    @property
    def num_expert_layers(self) -> int:
        """Blocks with experts."""
        return self.num_layers // self.group_size if self.experts.num else 0

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of an image."""
        return self.image_size, self.image_size, self.channels

    @property
    def num_tokens(self) -> int:
        """Tokens of an image: its patches, and the class token if there is one."""
        patches = ((self.image_size - self.patch_size) // self.stride + 1) ** 2
        return patches + (self.pooling == "class_token")


def num_params(config: VitConfig) -> int:
    """Count a model's parameters in closed form.

    Args:
      config: the shape of the model.

    Returns:
      The number of parameters.

    Example:
      >>> num_params(VitConfig(key_bias=True))  # ViT-B/16
      86567656
    """
    width, hidden = config.width, config.hidden_width
    num_up = 2 if is_gated(config.activation) else 1
    norm = 2 * width
    attention = 4 * width**2 + width
    attention += (2 * config.qkv_bias + config.key_bias) * width
    mlp = (num_up + 1) * width * hidden + num_up * hidden + width
    patch = config.patch_size**2 * config.channels * width + width
    tokens = (config.num_tokens + (config.pooling == "class_token")) * width
    classifier = (width + 1) * config.num_labels
    experts = num_expert_params(
        *(config.experts, width, config.experts.width or hidden),
        gated=is_gated(config.activation),
        bias=True,
    )
    blocks = config.num_layers * (attention + mlp + 2 * norm)
    blocks += config.num_expert_layers * (experts - mlp)
    return patch + tokens + blocks + norm + classifier


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(
            f"VitConfig: {field}={value!r} must be one of "
            f"{', '.join(map(repr, choices))}.{near_match(value, choices)}"
        )
