"""Which images are there, of which class, and how do they become arrays of one size?

Pillow decodes them: ``pip install 'jaxpar[images]'``.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import io
import os
import struct
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import xxhash
from jaxtyping import UInt8

from jaxpar.data.files import find_files
from jaxpar.data.rows import ordered
from jaxpar.data.splits import is_heldout
from jaxpar.launch.extras import import_extra

_SUFFIXES = frozenset(
    (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
)
_CHOICES = {
    "split": ("train", "heldout", "all"),
    "mode": ("RGB", "L"),
    "on_bad": ("stop", "skip"),
}


class ImageFolder:
    """Images in a folder that has one subfolder for each class.

    Each image is resized and cropped around its centre to one size. A row has "image",
    uint8 [H, W, 3], or [H, W, 1] of grey ones, and "label", int32: the place of its
    class in `classes`. Files without a suffix of an image are left out.

    A file is held out by a hash of its path below the folder (`jaxpar.data.splits`):
    it stays in its split when others are added or removed.

    Attributes:
      classes: names of the subfolders that hold images, sorted.
      files: paths of the split's images below the folder, sorted.
      bad: files found so far that can't be decoded -> why.

    Args:
      path: the folder.
      size: height and width of the result, or one number for both; pixels.
      split: "train", "heldout" or "all".
      heldout: one file in so many is held out.
      mode: "RGB", or "L" for grey; images of any mode are converted.
      on_bad: at a file that can't be decoded, "stop" with an error, or "skip" it with a
        warning: the next good image of `files` takes its place, in all runs alike.

    Raises:
      ModuleNotFoundError: if Pillow is missing.
      FileNotFoundError: if the folder doesn't exist.
      ValueError: if an argument is out of range, or the folder or split has no image.
    """

    padding = 0.0

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        size: int | tuple[int, int],
        split: str = "train",
        heldout: int = 20,
        mode: str = "RGB",
        on_bad: str = "stop",
    ):
        self._size = (size, size) if isinstance(size, int) else size
        _check(self._size, heldout, split=split, mode=mode, on_bad=on_bad)
        _import_pillow()
        self.path, self._mode, self._on_bad = Path(path), mode, on_bad
        names = _find_images(self.path)
        self.classes = tuple(sorted({_class_of(name) for name in names}))
        self.files = tuple(n for n in names if _is_in(n, split, heldout))
        if not self.files:
            raise ValueError(
                f"split={split!r} has none of the {len(names):,} images below "
                f"'{path}', of which one in heldout={heldout} is held out; give more "
                "images, or another heldout=."
            )
        self._labels = {name: label for label, name in enumerate(self.classes)}
        self.bad: dict[str, str] = {}

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of one row."""
        return {
            "image": jax.ShapeDtypeStruct((*self._size, len(self._mode)), np.uint8),
            "label": jax.ShapeDtypeStruct((), np.int32),
        }

    @property
    def description(self) -> str:
        """Numbers of images and classes."""
        return f"{len(self):,} images of {len(self.classes):,} classes"

    def __len__(self) -> int:
        return len(self.files)

    def read(self, numbers: Collection[int]) -> dict[str, np.ndarray]:
        """Read and decode images, in parallel."""
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
            rows = list(threads.map(self._row, numbers))
        images, labels = zip(*rows, strict=True)
        return {"image": np.stack(images), "label": np.array(labels, np.int32)}

    def _row(self, number: int) -> tuple[np.ndarray, int]:
        """The image of a number, or the next one that can be decoded; its label."""
        for following in range(len(self)):
            name = self.files[(number + following) % len(self)]
            if name in self.bad:
                continue
            # A file that can't be read is not a bad image: the disk may be gone.
            content = (self.path / name).read_bytes()
            try:
                return _decode(content, self._size, self._mode), self._labels[
                    _class_of(name)
                ]
            except _decoding_errors() as error:
                self._refuse(name, error)
        raise ValueError(f"none of the {len(self):,} images can be decoded.")

    def _refuse(self, name: str, error: Exception) -> None:
        if self._on_bad == "stop":
            raise ValueError(
                f"'{self.path / name}' can't be decoded ({error}); remove the file, or "
                "give on_bad='skip' to leave such files out."
            ) from error
        self.bad[name] = str(error)
        warnings.warn(
            f"'{self.path / name}' can't be decoded ({error}); the next image takes "
            f"its place, as for {len(self.bad)} so far.",
            stacklevel=2,
        )

    def identity(self) -> dict[str, Any]:
        """The size, and the files by name and length."""
        return {
            "image_size": list(self._size),
            "num_images": len(self),
            "sha256": self._sha256,
            **({} if self._mode == "RGB" else {"mode": self._mode}),
        }

    @functools.cached_property
    def _sha256(self) -> str:
        digest = hashlib.sha256("\n".join(self.classes).encode())
        for name in self.files:
            length = (self.path / name).stat().st_size
            digest.update(f"\n{name} {length}".encode())
        return digest.hexdigest()

    def order(self, *, seed: int, shuffle: bool, repeat: bool) -> grain.MapDataset[int]:
        """The stream of images."""
        return ordered(len(self), seed=seed, shuffle=shuffle, repeat=repeat)


def _find_images(path: Path) -> list[str]:
    if not path.is_dir():
        raise FileNotFoundError(
            f"path: '{path}' is not a folder; give one with a subfolder for each class."
        )
    found = []
    with contextlib.suppress(FileNotFoundError):
        found = [name for name, _ in find_files(path, "*/*")]
    images = [name for name in found if Path(name).suffix.lower() in _SUFFIXES]
    if not images:
        raise ValueError(
            f"path: '{path}' has no image in a subfolder; give a folder with one "
            "subfolder of images for each class."
        )
    return images


def _class_of(name: str) -> str:
    return name.split("/", maxsplit=1)[0]


def _is_in(name: str, split: str, heldout: int) -> bool:
    if split == "all":
        return True
    is_held = is_heldout(xxhash.xxh3_64_intdigest(name.encode()), 1 / heldout)
    return is_held == (split == "heldout")


def _decode(
    content: bytes, size: tuple[int, int], mode: str
) -> UInt8[np.ndarray, "_ _ C"]:
    """Decode an image, upright, to a mode of a height and a width."""
    image_module, ops = _import_pillow()
    height, width = size
    with image_module.open(io.BytesIO(content)) as image:
        upright = ops.exif_transpose(image).convert(mode)
    fitted = ops.fit(upright, (width, height), image_module.Resampling.BICUBIC)
    return np.asarray(fitted).reshape(height, width, len(mode))


def _decoding_errors() -> tuple[type[Exception], ...]:
    """What Pillow raises for contents that are not an image."""
    bomb = _import_pillow()[0].DecompressionBombError
    # Pillow's UnidentifiedImageError is an OSError.
    return (OSError, SyntaxError, ValueError, EOFError, struct.error, bomb)


@functools.cache
def _import_pillow() -> tuple[Any, Any]:
    names = "PIL.Image", "PIL.ImageOps"
    image, ops = (import_extra(name, "ImageFolder") for name in names)
    return image, ops


def _check(size: tuple[int, int], heldout: int, **given: str) -> None:
    if min(size) < 1:
        raise ValueError(f"size={size} must be at least 1 pixel; give a positive one.")
    if heldout < 2:
        raise ValueError(
            f"heldout={heldout} must be at least 2: one file in so many is held out; "
            "give split='all' to hold out none."
        )
    for name, value in given.items():
        if value not in _CHOICES[name]:
            choices = ", ".join(map(repr, _CHOICES[name]))
            raise ValueError(f"{name}={value!r} must be one of {choices}.")
