"""Which T5 have names? The sizes of T5 1.1, and small ones for a CPU."""

from jaxpar.models.t5.config import T5Config


def _t5(num_layers: int, width: int, num_heads: int, mlp_width: int) -> T5Config:
    return T5Config(
        vocab_size=32_128,
        num_layers=num_layers,
        num_heads=num_heads,
        width=width,
        head_width=64,
        mlp_width=mlp_width,
    )


T5_PRESETS: dict[str, T5Config] = {
    "tiny": T5Config(vocab_size=512, num_layers=2, width=64),
    "1m": T5Config(vocab_size=2048, num_layers=2, width=128, mlp_width=256),
    "small": _t5(8, 512, 6, 1024),
    "base": _t5(12, 768, 12, 2048),
    "large": _t5(24, 1024, 16, 2816),
    "xl": _t5(24, 2048, 32, 5120),
    "xxl": _t5(24, 4096, 64, 10_240),
}
"""Configs of T5 1.1 by name.

"tiny" and "1m" train on a CPU. The others are the published
ones, of 77 million to 11 billion parameters.
"""
