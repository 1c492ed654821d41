"""How are adapters read and written as PEFT has them, and merged into kernels?"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.models.hf.leaves import MATRIX, Leaf, Piece, Stack, TensorPart
from jaxpar.models.lora import LoraConfig

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."
_FACTORS = {"a": "lora_A", "b": "lora_B"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "bias": ("none", None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
}


def adapter_leaves(leaves: Mapping[str, Leaf], config: LoraConfig) -> dict[str, Leaf]:
    """Path of an adapter's parameter -> the tensors that it is made of.

    Args:
      leaves: of the model without adapters.
      config: of the adapters.

    Raises:
      ValueError: if a kernel with an adapter is a part of a tensor, as in GPT-2, or
        there is none.
    """
    found = {}
    for path, leaf in leaves.items():
        target = path.split("/")[-2] if path.endswith("/kernel") else ""
        if target not in config.targets or path.startswith(("embed/", "head/")):
            continue
        parts = list(leaf.piece.parts())
        if any(part.part[1] > 1 for part in parts):
            raise ValueError(
                f"{parts[0].name}: holds {target} beside others, and so does PEFT's "
                "adapter of it, whose factors are shared; there is none for a part. "
                "Save the model with its adapters merged (Pretrained.save)."
            )
        for factor, theirs in _FACTORS.items():
            adapter = f"{path.removesuffix('kernel')}adapter/{factor}"
            found[adapter] = Leaf(_of_adapter(leaf.piece, theirs))
    if not found:
        raise ValueError(
            f"LoraConfig: targets={config.targets} are no kernels of this model."
        )
    return found


def _of_adapter(piece: Piece, factor: str) -> Piece:
    if isinstance(piece, Stack):
        return Stack(tuple(_of_adapter(own, factor) for own in piece.pieces))
    name = piece.name.removesuffix(".weight")
    return TensorPart(f"{_PREFIX}{name}.{factor}.weight", MATRIX)


def read_adapter(folder: str | Path, leaves: Mapping[str, Leaf]) -> LoraConfig:
    """The config of a PEFT folder's adapters.

    Args:
      folder: with adapter_config.json.
      leaves: of the model without adapters; they say what its modules are called.

    Raises:
      FileNotFoundError: if there is no config.
      ValueError: if it is of something else, or names modules that are not known.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"{str(folder)!r} has no {CONFIG}: give the folder that PEFT's "
            "save_pretrained wrote."
        )
    hf = json.loads(path.read_text(encoding="utf-8"))
    for field, known in _NEUTRAL.items():
        if field in hf and hf[field] not in known:
            raise ValueError(
                f"{str(path)!r}: {field}={hf[field]!r} is not known here; "
                f"{known[0]!r} is."
            )
    modules = _modules(leaves)
    theirs = hf["target_modules"]
    if isinstance(theirs, str) or not set(theirs) <= set(modules):
        raise ValueError(
            f"{str(path)!r}: target_modules {theirs!r} must be a list of "
            f"{', '.join(modules)}."
        )
    return LoraConfig(
        rank=hf["r"],
        alpha=float(hf["lora_alpha"]),
        targets=tuple(modules[name] for name in theirs),
        rank_stabilised=bool(hf.get("use_rslora")),
    )


def write_adapter(
    folder: Path,
    tensors: Mapping[str, np.ndarray],
    config: LoraConfig,
    leaves: Mapping[str, Leaf],
) -> None:
    """Write adapters as PEFT loads them.

    Args:
      folder: a new one.
      tensors: by PEFT's names.
      config: of the adapters.
      leaves: of the model without adapters.

    Raises:
      ValueError: if `folder` exists.
    """
    # Not at the top: machines that only measure may lack it, and import the models.
    from safetensors.numpy import save_file  # noqa: PLC0415

    if folder.exists():
        raise ValueError(f"out={str(folder)!r} exists already; name a new folder.")
    theirs = {ours: name for name, ours in _modules(leaves).items()}
    hf = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "target_modules": [theirs[x] for x in config.targets if x in theirs],
        "use_rslora": config.rank_stabilised,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "base_model_name_or_path": None,
    }
    unfinished = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    own = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    save_file(own, unfinished / TENSORS, metadata={"format": "pt"})
    (unfinished / TENSORS).chmod(0o644)
    text = json.dumps(hf, indent=2) + "\n"
    (unfinished / CONFIG).write_text(text, encoding="utf-8")
    unfinished.rename(folder)


def merged(
    names: list[str], read: Callable[[str], np.ndarray], scale: float
) -> Iterator[tuple[str, np.ndarray]]:
    """A model's parameters without adapters: their updates are added to the kernels.

    Args:
      names: paths of all parameters.
      read: the array of one.
      scale: of the adapters (`LoraConfig.scale`).

    Returns:
      Path and array of each other parameter, one after the other.
    """
    known = set(names)
    for name in names:
        if "/adapter/" in name:
            continue
        value = read(name)
        adapter = f"{name.removesuffix('kernel')}adapter"
        if name.endswith("kernel") and f"{adapter}/a" in known:
            a, b = (read(f"{adapter}/{x}").astype(np.float32) for x in "ab")
            value = value.astype(np.float32) + scale * (a @ b)
        yield name, value


def _modules(leaves: Mapping[str, Leaf]) -> dict[str, str]:
    """What a module is called there -> here, of blocks' matmuls."""
    found = {}
    for path, leaf in leaves.items():
        if path.endswith("/kernel") and not path.startswith(("embed/", "head/")):
            found[leaf.name.split(".")[-2]] = path.split("/")[-2]
    return found
