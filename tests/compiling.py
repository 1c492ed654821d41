"""How do tests compile for the CPU: fast, for most programs run once or a few times."""

import os

import jaxlib.xla_client
import pytest

# XLA writes each loop of elementwise operations by itself rather than through MLIR,
# which takes half the time of a compilation that optimizes nothing.
FAST = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"


def read_xla_flags(flags: str) -> None:
    """Have XLA read flags, which a process does once; what it starts has none of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip())
        jaxlib.xla_client.CompileOptions()
