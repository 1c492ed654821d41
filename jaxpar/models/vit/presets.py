"""Which ViTs have names? Those of the paper, and a small one."""

import dataclasses
from typing import Any

from jaxpar.models.experts.config import ExpertsConfig
from jaxpar.models.vit.config import VitConfig
from jaxpar.tree import near_match

VIT_PRESETS: dict[str, VitConfig] = {
    "vit-tiny": VitConfig(
        image_size=12,
        patch_size=4,
        patch_stride=2,
        channels=1,
        num_labels=10,
        num_layers=4,
        num_heads=4,
        width=64,
        pooling="mean",
    ),
    "vit-s16": VitConfig(num_heads=6, width=384),
    "vit-b16": VitConfig(),
    "vit-b32": VitConfig(patch_size=32),
    "vit-l16": VitConfig(num_layers=24, num_heads=16, width=1024),
    "vit-h14": VitConfig(patch_size=14, num_layers=32, num_heads=16, width=1280),
    "v-moe-b16": VitConfig(
        experts=ExpertsConfig(
            num=32, every=2, capacity_factor=1.05, normalise_gates=False
        )
    ),
}
"""ViT configs by name; "vit-tiny" is for scikit-learn's digits, 8 x 8 grey pixels
with a border, in which shifts lose nothing; its patches overlap.

"vit-s16" is of half of B's width and heads. Keys have no bias: it has no gradient.
"v-moe-b16" has 32 experts in every other block, of which a token goes to two.

Source: Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021), table 1; Riquelme et
al., "Scaling Vision with Sparse Mixture of Experts" (2021), section 2.
"""


def vit_config(name: str, **overrides: Any) -> VitConfig:
    """Look up a preset, and replace fields.

    Args:
      name: one of `VIT_PRESETS`.
      **overrides: fields of `VitConfig` to replace.

    Returns:
      The config.

    Raises:
      ValueError: if there is no such preset, or no such field.

    Example:
      >>> vit_config("vit-b16", image_size=384).num_tokens
      577
    """
    if name not in VIT_PRESETS:
        raise ValueError(
            f"vit_config: name={name!r} must be one of "
            f"{', '.join(map(repr, VIT_PRESETS))}.{near_match(name, list(VIT_PRESETS))}"
        )
    fields = [field.name for field in dataclasses.fields(VitConfig)]
    for field in overrides:
        if field not in fields:
            raise ValueError(
                f"vit_config: {field}={overrides[field]!r} is not a field of "
                f"VitConfig.{near_match(field, fields)}"
            )
    return dataclasses.replace(VIT_PRESETS[name], **overrides)
