"""Where do programs for GPUs and TPUs get compiled: in processes of their own.

The compilers are jax's CUDA plug-in and libtpu; `make test` puts them into a folder
beside the environment, where ordinary processes don't find them. Nothing here may
import jax: a process must be prepared before that.
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
    sys.path.insert(0, str(FOLDER))
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "-1",
        "TPU_SKIP_MDS_QUERY": "1",
        # Two test workers compile for TPUs at once; no chip is in it.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        # Tuning asks a GPU how fast each kernel is.
        "XLA_FLAGS": "--xla_gpu_autotune_level=0 "
        "--xla_force_host_platform_device_count=8",
    }
