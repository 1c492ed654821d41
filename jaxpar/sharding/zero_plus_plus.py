"""ZeRO++: which of its techniques, and in how many bits, does a run use?"""

import dataclasses

from jaxpar.sharding.block_codes import BlockCodes


@dataclasses.dataclass(frozen=True)
class ZeroPlusPlus:
    """A ZeRO stage that communicates less, to pass as ``zero=``.

    Attributes:
      stage: the ZeRO stage: 1, 2 or 3.
      weight_bits: of a parameter while it is gathered, in training (qwZ): 8 or 4; None
        for the dtype of the computation.
      gradient_bits: of a gradient while it is reduced (qgZ): 8 or 4, by all-to-alls,
        sums in fp32; None for the dtype of reductions. First inside a replica, then
        between replicas, once a step. Leaves that data does not split go as they are.
      inside_bits: likewise, inside a replica alone, where nothing makes up for what
        rounding leaves out; None for `gradient_bits`.
      secondary: whether replicas split the state further (hpZ): a device stores one
        part in replica x data of masters and moments. Once a step parameters are
        gathered over replicas, in the dtype of the computation, to the shards that
        replicas then gather at use; gradients are scattered over replicas.
      block: elements that share a scale.
      error_decay: of what rounding left out of gradients between replicas, which is
        added to the next ones: error = decay error + (1 - decay) left out (LoCo).
      reset_every: steps after which that error begins at zero again.

    Raises:
      ValueError: if a number is out of range.

    Sources: Wang et al. 2023, "ZeRO++: Extremely Efficient Collective Communication for
    Giant Model Training"; Xie et al. 2024, "LoCo: Low-Bit Communication Adaptor for
    Large-scale Model Training".

    Example:
      >>> ZeroPlusPlus(3, gradient_bits=4).gradients.largest
      7
    """

    stage: int = 3
    weight_bits: int | None = 8
    gradient_bits: int | None = 8
    inside_bits: int | None = None
    secondary: bool = False
    block: int = 256
    error_decay: float = 0.8
    reset_every: int = 1024

    def __post_init__(self) -> None:
        if self.stage not in (1, 2, 3):
            raise ValueError(
                f"zero: stage={self.stage!r} of ZeroPlusPlus must be 1, 2 or 3: at 0 "
                "nothing is split."
            )
        for name in ("weight_bits", "gradient_bits", "inside_bits"):
            if (bits := getattr(self, name)) not in (8, 4, None):
                raise ValueError(f"zero: {name}={bits!r} must be 8, 4 or None.")
        if self.inside_bits and not self.gradient_bits:
            raise ValueError(
                f"zero: inside_bits={self.inside_bits} needs gradient_bits, those "
                "between replicas; use gradient_bits=8, or inside_bits=None."
            )
        if not 0 <= self.error_decay < 1:
            raise ValueError(
                f"zero: error_decay={self.error_decay} must be from 0 to below 1."
            )
        if self.reset_every < 1:
            raise ValueError(
                f"zero: reset_every={self.reset_every} must be at least 1."
            )
        BlockCodes(8, self.block)

    @property
    def weights(self) -> BlockCodes | None:
        """How parameters are coded."""
        return BlockCodes(self.weight_bits, self.block) if self.weight_bits else None

    @property
    def gradients(self) -> BlockCodes | None:
        """How gradients are coded between replicas."""
        bits = self.gradient_bits
        return BlockCodes(bits, self.block) if bits else None

    @property
    def gradients_inside(self) -> BlockCodes | None:
        """How they are coded inside a replica."""
        bits = self.inside_bits or self.gradient_bits
        return BlockCodes(bits, self.block) if bits else None
