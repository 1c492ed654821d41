"""Load a folder as torch would for this library's layout: FOLDER.

Each tensor in fp32, matrices transposed. Prints a line of JSON: seconds, and the bytes
that the process held at its most beside the tensors.
"""

import json
import sys
import time
from pathlib import Path

import torch
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).resolve().parent))

from memory import Peak

torch.ones(64, 64) @ torch.ones(64, 64)
peak, began = Peak(), time.perf_counter()
tensors = {}
for path in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is not a dict
            found = file.get_tensor(name)
            is_kernel = found.ndim == 2 and "embed" not in name
            tensors[name] = (found.t() if is_kernel else found).to(
                torch.float32, memory_format=torch.contiguous_format
            )
seconds = time.perf_counter() - began
held = sum(x.numel() * x.element_size() for x in tensors.values())
assert all(x.is_contiguous() for x in tensors.values())
print(json.dumps({"seconds": seconds, "beside": peak.most - peak.first - held}))
