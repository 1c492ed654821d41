"""Where do programs for GPUs and TPUs get compiled: in processes of their own.

The compilers are jax's CUDA plug-in and libtpu; `make test` puts them into a folder
beside the environment, where ordinary processes don't find them. Nothing here imports
jax before XLA's flags are set.
"""

import concurrent.futures
import multiprocessing
import os
import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "compilers"
"""What `.ci/setup --compilers` fills."""


def start() -> concurrent.futures.ProcessPoolExecutor:
    """Start a process that can compile for devices that are not here."""
    return concurrent.futures.ProcessPoolExecutor(
        max_workers=1,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_prepare,
    )


def _prepare() -> None:
    os.environ |= {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        # Tuning asks a GPU how fast each kernel is.
        "XLA_FLAGS": "--xla_gpu_autotune_level=0 "
        "--xla_force_host_platform_device_count=8",
    }
    from jaxpar.planner.absent_devices import prepare_process  # noqa: PLC0415 - see above

    prepare_process()
