"""Load a folder as torch would for this library's layout: FOLDER.

Each tensor in fp32, matrices transposed. Prints a line of JSON: seconds, and the bytes
that the process held at its most beside the tensors.
"""

import json
import sys
import threading
import time
from pathlib import Path

import torch
from safetensors import safe_open


class Peak(threading.Thread):
    """Watches how many bytes of its own the process holds; files in memory are not."""

    def __init__(self):
        super().__init__(daemon=True)
        self.first = self.most = self.now()
        self.start()

    def now(self) -> int:
        """Bytes that are held."""
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return 1024 * int(status.split("RssAnon:")[1].split()[0])

    def run(self) -> None:
        """Look every five milliseconds."""
        while True:
            self.most = max(self.most, self.now())
            time.sleep(0.005)


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
