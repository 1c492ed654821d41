"""Two processes that need one cache at once; run by test_cache.py in a process.

It forks, so that all have imported what they need. The builder is "killed" before it is
done, or "kept" and goes on once the other one waits.
"""

import os
import signal
import sys
from pathlib import Path

from jaxpar.data.cache import cached


def in_child(root: Path, number: int) -> tuple[int, int, int]:
    """Start a builder: (process, where it says what it does, what it waits for)."""
    said, says = os.pipe()
    waits, go = os.pipe()
    pid = os.fork()
    if pid:
        os.close(says)
        return pid, said, go

    def build(folder: Path) -> dict[str, int]:
        (folder / "data").write_text("half")
        os.write(says, b"builds ")
        os.read(waits, 1)
        (folder / "data").write_text("whole")
        return {"by": number}

    folder, index = cached(root, {"of": "test"}, build)
    os.write(says, f"has {(folder / 'data').read_text()} by {index['by']}".encode())
    os._exit(0)


def has_open(pid: int, suffix: str) -> bool:
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(link))
        except FileNotFoundError:  # Closed meanwhile.
            continue
    return any(link.endswith(suffix) for link in links)


def read_all(pid: int, said: int) -> str:
    os.waitpid(pid, 0)
    return os.read(said, 999).decode()


def main(root: Path, end: str) -> None:
    first, first_said, first_go = in_child(root, 1)
    os.read(first_said, 7)
    second, second_said, second_go = in_child(root, 2)
    while not has_open(second, ".lock"):
        pass
    os.write(second_go, b".")
    if end == "killed":
        os.kill(first, signal.SIGKILL)
    os.write(first_go, b".")
    print(end, f"first {read_all(first, first_said)}".strip())
    print(end, f"second {read_all(second, second_said)}")


if __name__ == "__main__":
    for each in ("killed", "kept"):
        main(Path(sys.argv[1], each), each)
