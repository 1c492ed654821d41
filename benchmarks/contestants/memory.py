"""How many bytes does a process hold at its most? Needs the standard library only."""

import threading
import time
from pathlib import Path


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
