"""What does a CoAtNet's config contain, and which values are valid?"""

import dataclasses
import math

from jaxpar.model.remat import check_policy
from jaxpar.tree import near_match

_CHOICES = {
    "norm": ("batch", "group"),
    "stride_in": ("depthwise", "widen"),
    "attention": ("auto", "xla", "cudnn", "blocked"),
}
_AT_LEAST_ONE = (
    *("num_classes", "image_size", "channels", "stem_width", "stem_stride"),
    *("head_size", "expansion", "norm_groups", "unroll"),
)
NUM_LEVELS = 4
"""S1 to S4: sizes of the maps, each half of the one before."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoatnetConfig:
    """The shape of a CoAtNet, and how its blocks are run.

    Attributes:
      num_classes: of the classifier.
      image_size: height and width of an image, pixels; a multiple of 16 x stem_stride.
      channels: of an image.
      stem_width: channels of S0, the two convolutions before the blocks.
      stem_stride: of the first of the two; 1 keeps small images from vanishing.
      widths: channels of S1 and S2, whose blocks convolve, and of S3 and S4, whose
        blocks attend.
      depths: blocks of each; at least 2, because the first changes the size and the
        others, which are equal, are a section.
      head_size: features of an attention head.
      expansion: features inside a block are so many times its channels.
      squeeze: features between the two matmuls of squeeze-and-excitation, as a fraction
        of a block's channels.
      stride_in: where the first block of S1 and that of S2 halve their maps: in the
        "depthwise" convolution, as in timm, or before it, in the matmul that widens
        ("widen"), as in the paper's equation 5.
      key_bias: whether keys have a bias. It adds the same to all scores of a query, so
        it has no gradient but rounding noise, of which Adam makes full steps.
      norm: of the convolutions: "batch" (statistics of a micro-batch: no pipeline), or
        "group" (of one row: any mesh).
      norm_groups: groups of channels of "group"; divides all widths.
      stochastic_depth: probability that training drops a block's update of a row; the
        same for all blocks.
      remat: one of `jaxpar.model.remat.REMAT_POLICIES`, for all blocks but the first of
        each size.
      unroll: blocks per iteration of the loop over a section, on one stage; at most the
        largest depth - 1, which removes the loops.
      attention: "auto", "xla", "cudnn" or "blocked" (see `jaxpar.models.attention`).
      allow_uneven: run on a pipeline that can't divide the blocks evenly
        (`jaxpar.PipelineModel`); sections of a CoAtNet are short.

    Raises:
      ValueError: if a number is out of range, or a word is not one of its choices.

    Example:
      >>> CoatnetConfig().map_sizes
      (56, 28, 14, 7)
    """

    num_classes: int = 1000
    image_size: int = 224
    channels: int = 3
    stem_width: int = 64
    stem_stride: int = 2
    widths: tuple[int, ...] = (96, 192, 384, 768)
    depths: tuple[int, ...] = (2, 3, 5, 2)
    head_size: int = 32
    expansion: int = 4
    squeeze: float = 0.25
    stride_in: str = "depthwise"
    key_bias: bool = False
    norm: str = "batch"
    norm_groups: int = 32
    stochastic_depth: float = 0.0
    remat: str = "none"
    unroll: int = 1
    attention: str = "auto"
    allow_uneven: bool = False

    def __post_init__(self):
        for field, choices in _CHOICES.items():
            value = getattr(self, field)
            if value not in choices:
                raise ValueError(
                    f"CoatnetConfig: {field}={value!r} must be one of "
                    f"{', '.join(map(repr, choices))}.{near_match(value, choices)}"
                )
        check_policy(self.remat, ())
        self._check_numbers()
        self._check_sizes()

    def _check_numbers(self) -> None:
        for field in _AT_LEAST_ONE:
            value = getattr(self, field)
            if value < 1:
                raise ValueError(f"CoatnetConfig: {field}={value} must be at least 1.")
        if not 0 <= self.stochastic_depth < 1:
            raise ValueError(
                f"CoatnetConfig: stochastic_depth={self.stochastic_depth} must be at "
                "least 0 and below 1; it is the fraction of updates that are dropped."
            )
        if not 0 < self.squeeze <= 1:
            raise ValueError(
                f"CoatnetConfig: squeeze={self.squeeze} must be above 0 and at most 1, "
                "such as 0.25."
            )
        for field, least in (("widths", 1), ("depths", 2)):
            value = getattr(self, field)
            if len(value) != NUM_LEVELS or min(value) < least:
                raise ValueError(
                    f"CoatnetConfig: {field}={value} must be {NUM_LEVELS} numbers, for "
                    f"S1 to S4, of at least {least}."
                )
        if self.unroll > max(self.depths) - 1:
            raise ValueError(
                f"CoatnetConfig: unroll={self.unroll} must be at most "
                f"{max(self.depths) - 1}, the blocks of the longest section of "
                f"depths={self.depths}, which removes the loops."
            )

    def _check_sizes(self) -> None:
        step = 2**NUM_LEVELS * self.stem_stride
        if self.image_size % step:
            raise ValueError(
                f"CoatnetConfig: image_size={self.image_size} must be a multiple of "
                f"{step}, by which the blocks and stem_stride={self.stem_stride} "
                f"divide it; use {-(-self.image_size // step) * step}."
            )
        for width in self.widths[2:]:
            if width % self.head_size:
                raise ValueError(
                    f"CoatnetConfig: widths={self.widths}: those of S3 and S4 must be "
                    f"multiples of head_size={self.head_size}; {width} is not."
                )
        for width in (self.stem_width, *self.widths[:2]) * (self.norm == "group"):
            if width % self.norm_groups:
                raise ValueError(
                    f"CoatnetConfig: norm='group' with norm_groups={self.norm_groups} "
                    f"must divide the channels of convolutions, and {width} is not a "
                    "multiple of it; use "
                    f"{math.gcd(self.stem_width, *self.widths[:2])}."
                )

    @property
    def map_sizes(self) -> tuple[int, ...]:
        """Height and width of the maps of S1 to S4."""
        first = self.image_size // self.stem_stride
        return tuple(first // 2 ** (1 + level) for level in range(NUM_LEVELS))

    def width_before(self, level: int) -> int:
        """Channels that the first block of a level is given; S1 is level 0."""
        return self.widths[level - 1] if level else self.stem_width
