"""Which CoAtNets have names? Those of the paper, and a small one."""

import dataclasses
from typing import Any

from jaxpar.models.coatnet.config import CoatnetConfig
from jaxpar.tree import near_match

_LARGE = CoatnetConfig(
    stem_width=192, widths=(192, 384, 768, 1536), depths=(2, 6, 14, 2)
)

COATNET_PRESETS: dict[str, CoatnetConfig] = {
    "coatnet-tiny": CoatnetConfig(
        num_classes=10,
        image_size=32,
        stem_width=16,
        stem_stride=1,
        widths=(16, 32, 64, 128),
        depths=(2, 2, 3, 2),
        head_size=16,
        norm="group",
        norm_groups=4,
    ),
    "coatnet-0": CoatnetConfig(),
    "coatnet-1": CoatnetConfig(depths=(2, 6, 14, 2)),
    "coatnet-2": CoatnetConfig(
        stem_width=128, widths=(128, 256, 512, 1024), depths=(2, 6, 14, 2)
    ),
    "coatnet-3": _LARGE,
    "coatnet-4": dataclasses.replace(_LARGE, depths=(2, 12, 28, 2)),
}
"""CoAtNet configs by name; "coatnet-tiny" is for images of 32 x 32.

The others are timm's ``coatnet_0_224`` to ``coatnet_4_224``. With
``stride_in="widen"`` they have the multiply-adds of the paper, to 2 %; "coatnet-4"
there is for images of 384 x 384.

Source: Dai et al., "CoAtNet: Marrying Convolution and Attention for All Data Sizes"
(2021), tables 3 and 4.
"""


def coatnet_config(name: str, **overrides: Any) -> CoatnetConfig:
    """Look up a preset, and replace fields.

    Args:
      name: one of `COATNET_PRESETS`.
      **overrides: fields of `CoatnetConfig` to replace.

    Returns:
      The config.

    Raises:
      ValueError: if there is no such preset, or no such field.

    Example:
      >>> coatnet_config("coatnet-4", image_size=384).map_sizes
      (96, 48, 24, 12)
    """
    if name not in COATNET_PRESETS:
        raise ValueError(
            f"coatnet_config: name={name!r} must be one of "
            f"{', '.join(map(repr, COATNET_PRESETS))}."
            f"{near_match(name, list(COATNET_PRESETS))}"
        )
    fields = [field.name for field in dataclasses.fields(CoatnetConfig)]
    for field in overrides:
        if field not in fields:
            raise ValueError(
                f"coatnet_config: {field}={overrides[field]!r} is not a field of "
                f"CoatnetConfig.{near_match(field, fields)}"
            )
    return dataclasses.replace(COATNET_PRESETS[name], **overrides)
