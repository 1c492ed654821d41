"""Checkpoints as whoever means harm would write them, and what reading them does.

Run as a program, so that a crash, a file outside and memory taken are seen by others:

    python -m tests.checkpoint.mutations FOLDER SEED COUNT
"""

import collections
import json
import os
import random
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.checkpoint import Checkpoints, DamagedError, manifest
from jaxpar.checkpoint import folder as files
from tests.memory import most_bytes

EVIL_NAMES = [
    "../evil",
    "/tmp/evil",
    "arrays/../../evil",
    "evil\0",
    "..",
    "",
    "a\\..\\evil",
    "arrays//d",
    "x" * 5000,
]
EVIL_NUMBERS = [-1, 2**63, 10**400, 1.5, "1", None, True, [], {"a": 1}]
MEMORY_BYTES = 100_000_000
"""Above what an unharmed checkpoint takes; the least array that is declared beyond its
file (of 10**6 elements a dim, two dims on) would take far more."""


def target() -> dict[str, Any]:
    return {f"leaf{i}": jnp.zeros(40) for i in range(3)} | {"step": jnp.int32(0)}


def make(folder: Path) -> None:
    """Save one step."""
    checkpoints = Checkpoints(folder)
    tree = {f"leaf{i}": jnp.arange(40.0) + i for i in range(3)}
    checkpoints.save(1, {**tree, "step": jnp.int32(1)})
    checkpoints.close()


def mutate_file(step: Path, rng: random.Random) -> None:
    """Change one file that is not the manifest."""
    found = sorted(p for p in (step / "arrays").rglob("*") if p.is_file())
    while True:
        path = rng.choice(found)
        content = mutated(path.read_bytes(), found, rng)
        if content != path.read_bytes():
            path.write_bytes(content)
            return


def mutated(before: bytes, found: list[Path], rng: random.Random) -> bytes:
    """Other bytes, or the same ones where a change changes nothing."""
    content = bytearray(before)
    kind = rng.randrange(6)
    if kind == 0 and content:
        for _ in range(rng.randint(1, 8)):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del content[rng.randrange(len(content) + 1) :]
    elif kind == 2:
        at = rng.randrange(len(content) + 1)
        content[at:at] = rng.randbytes(rng.randint(1, 64))
    elif kind == 3:
        content = bytearray(rng.choice(found).read_bytes())
    elif kind == 4:
        content = bytearray(
            content.replace(b"40", b"4000000000").replace(b"[1]", b"[9]")
        )
    else:
        content = bytearray(b"[" * 100_000 if rng.random() < 0.5 else b"{}")
    return bytes(content)


def mutate_manifest(step: Path, rng: random.Random) -> None:
    """Change one value of the manifest."""
    path = step / manifest.MANIFEST
    content = json.loads(path.read_text())
    kind = rng.randrange(7)
    if kind == 0:
        content["files"][rng.choice(EVIL_NAMES)] = [4, "0" * 32]
    elif kind == 1:
        name = rng.choice(sorted(content["leaves"]))
        content["leaves"][name]["shape"] = [10**6] * rng.randint(1, 6)
    elif kind == 2:
        name = rng.choice(sorted(content["leaves"]))
        content["leaves"][rng.choice(EVIL_NAMES)] = content["leaves"].pop(name)
    elif kind == 3:
        content[rng.choice(sorted(content))] = rng.choice(EVIL_NUMBERS)
    elif kind == 4:
        del content[rng.choice(sorted(content))]
    elif kind == 5:
        name = rng.choice(sorted(content["leaves"]))
        content["leaves"][name]["dtype"] = rng.choice(["O", "V9", "x", "key<z>", "<U9"])
    else:
        name = rng.choice(sorted(content["files"]))
        content["files"][name] = rng.choice(EVIL_NUMBERS)
    text = json.dumps(content).encode()
    if rng.random() < 0.1:
        text = b'{"a":' * 50_000
    path.write_bytes(text)
    (step / manifest.DIGEST).write_text(manifest.digest(text))


def reseal(step: Path) -> None:
    """Let the manifest fit the files as they are now."""
    found = manifest.read_manifest(step)
    for name in (manifest.MANIFEST, manifest.DIGEST):
        (step / name).unlink()
    manifest.seal(step, found)


def plant_link(step: Path, rng: random.Random) -> None:
    """Put a link in the place of a file or a folder."""
    found = sorted((step / "arrays").rglob("*"))
    path = rng.choice(found)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    path.symlink_to(rng.choice(["/etc/passwd", "/", "../../..", str(step)]))


def mutate(step: Path, rng: random.Random) -> str:
    """Harm a step; what was done."""
    kind = rng.choice(["file", "file, resealed", "manifest", "manifest", "link"])
    if kind.startswith("file"):
        mutate_file(step, rng)
        if "resealed" in kind:
            reseal(step)
    elif kind == "link":
        plant_link(step, rng)
    else:
        mutate_manifest(step, rng)
    return kind


def outcome(read: Callable[[], Any]) -> str:
    """What reading comes to: "read", or the kind of a clear error."""
    try:
        read()
    except (DamagedError, FileNotFoundError, ValueError) as error:
        return type(error).__name__ if str(error) else "says nothing"
    return "read"


def main(folder: Path, seed: int, count: int) -> None:
    """Mutate and read; prints what came of it, and the memory taken."""
    jax.config.update("jax_platforms", "cpu")
    warnings.simplefilter("ignore")
    rng, pristine, harmed = random.Random(seed), folder / "a", folder / "b"
    make(pristine)
    Checkpoints(pristine).restore(target())
    before = most_bytes()
    counted: collections.Counter[str] = collections.Counter()
    for _ in range(count):
        shutil.copytree(pristine, harmed, symlinks=True)
        kind = mutate(files.step_path(harmed, 1), rng)
        came = outcome(lambda: Checkpoints(harmed).restore(target()))
        counted[f"{kind}: {came}"] += 1
        shutil.rmtree(harmed)
    taken = most_bytes() - before
    print(json.dumps({"counted": counted, "taken": taken, "pid": os.getpid()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
