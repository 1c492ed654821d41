"""Where does a leaf's every dim go on the tensor axis: from names and rules to specs.

A model may name the dims of its parameters (``("embed", "mlp")``); `rules` map those
names, or the paths of leaves, to mesh axes. What no rule speaks of is kept whole
while it is computed on; ZeRO decides where it rests (`jaxpar.sharding.zero`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from jaxpar import tree
from jaxpar.mesh import AXES, DATA, TENSOR
from jaxpar.sharding.tensor import LOGICAL_RULES, VOCAB

Rules = Mapping[str, str | tuple[str, ...] | P | None]
"""Logical name -> "tensor", ("pipe", "tensor") for a vocabulary, or None; and path
pattern -> PartitionSpec."""

Spec = tuple[str | tuple[str, ...] | None, ...]
"""One mesh axis, several, or None per dim."""


def compute_specs(
    shapes: Mapping[str, tuple[int, ...]],
    names: Mapping[str, Sequence[Any] | None],
    rules: Rules,
    sizes: Mapping[str, int],
) -> dict[str, Spec]:
    """Decide on which axis each dim of each leaf is computed.

    Path rules win over logical names; among path rules the first that matches.

    Args:
      shapes: leaf name -> shape.
      names: leaf name -> the model's own names of its dims, or None.
      rules: the user's rules, over `LOGICAL_RULES`.
      sizes: mesh axis -> devices on it.

    Returns:
      leaf name -> one entry per dim.

    Raises:
      ValueError: for an unknown axis or logical name, a rule that matches nothing, a
        spec that does not fit its leaf, or a dim that its axis does not divide.

    Example:
      >>> compute_specs({"w": (4, 8)}, {"w": ("embed", "mlp")}, {}, {"tensor": 2})
      {'w': (None, 'tensor')}
    """
    for key, value in rules.items():
        _check_axes(key, tuple(value) if isinstance(value, P) else (value,))
    paths = {key: spec for key, spec in rules.items() if isinstance(spec, P)}
    logical = {**LOGICAL_RULES, **{k: v for k, v in rules.items() if k not in paths}}
    specs, used = {}, set()
    for name, shape in shapes.items():
        fits = [pattern for pattern in paths if tree.matches(pattern, name)]
        used.update(fits, names.get(name) or ())
        if fits:
            spec = _padded(fits[0], paths[fits[0]], name, shape)
        else:
            spec = _from_names(name, shape, names.get(name), logical)
        spec = tuple(_on_mesh(entry, sizes) for entry in spec)
        _check_divides(name, shape, spec, sizes)
        specs[name] = spec
    for key in rules:
        if key not in used:
            raise ValueError(_unused(key, key in paths, shapes, names))
    return specs


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes of one entry of a spec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _on_mesh(
    entry: str | tuple[str, ...] | None, sizes: Mapping[str, int]
) -> str | tuple[str, ...] | None:
    """An entry of several axes without those that have one device."""
    if not isinstance(entry, tuple):
        return entry
    axes = tuple(axis for axis in entry if sizes.get(axis, 1) > 1)
    return axes if len(axes) > 1 else next(iter(axes), TENSOR)


def _check_axes(key: str, axes: Sequence[Any]) -> None:
    for axis in axes:
        if axis is None or axis in (TENSOR, VOCAB):
            continue
        if axis == DATA:
            raise ValueError(
                f"rules: {key!r} maps to 'data', but parameters are spread over data "
                "by zero=1, 2 or 3, not by rules. Use 'tensor' or None."
            )
        if not isinstance(axis, str) or axis not in AXES:
            raise ValueError(
                f"rules: {key!r} maps to {axis!r}, which is not a mesh axis. "
                f"Use 'tensor' or None.{tree.near_match(str(axis), AXES)}"
            )
        raise ValueError(
            f"rules: {key!r} maps to {axis!r}; only 'tensor' can split a layer. "
            "Use 'tensor' or None."
        )


def _padded(pattern: str, spec: P, name: str, shape: tuple[int, ...]) -> Spec:
    if len(spec) > len(shape):
        raise ValueError(
            f"rules: {pattern!r} gives {spec} to {name}, which has {len(shape)} dims "
            f"(shape {shape}). Give at most one entry per dim."
        )
    if tuple(spec).count(TENSOR) > 1:
        raise ValueError(
            f"rules: {pattern!r} gives {spec} to {name}, but an axis can split only "
            "one dim. Keep one 'tensor' and make the others None."
        )
    return tuple(spec) + (None,) * (len(shape) - len(spec))


def _from_names(
    leaf: str,
    shape: tuple[int, ...],
    names: Sequence[Any] | None,
    logical: Mapping[str, Any],
) -> Spec:
    if not names:
        return (None,) * len(shape)
    if len(names) > len(shape):
        raise ValueError(
            f"rules: the model names {len(names)} dims of {leaf}, {tuple(names)}, but "
            f"it has {len(shape)} (shape {shape}). Name each dim once, in its order."
        )
    spec = []
    for name in names:
        axis = name if name in AXES else logical.get(name)
        if name is not None and name not in AXES and name not in logical:
            raise ValueError(
                f"rules: the model names a dim of {leaf} {name!r}, which no rule "
                f"knows. Pass rules={{{name!r}: None}} to keep it whole or "
                f"rules={{{name!r}: 'tensor'}} to split it."
                + tree.near_match(str(name), logical)
            )
        taken = {own for entry in spec for own in axes_of(entry)}
        spec.append(None if taken & set(axes_of(axis)) else axis)
    _check_axes(leaf, spec)
    return tuple(spec) + (None,) * (len(shape) - len(spec))


def _check_divides(
    name: str, shape: tuple[int, ...], spec: Spec, sizes: Mapping[str, int]
) -> None:
    for dim, (size, axis) in enumerate(zip(shape, spec, strict=True)):
        ways = math.prod(sizes.get(own, 1) for own in axes_of(axis))
        if size % ways:
            by = " x ".join(axes_of(axis))
            raise ValueError(
                f"rules: dim {dim} of {name} (shape {shape}) has {size} elements, "
                f"which {by}={ways} does not divide. Pad the dim to a multiple of "
                f"{ways}, change the mesh, or map it to None in rules."
            )


def _unused(key, is_path, shapes, names) -> str:
    known = (
        shapes if is_path else {n for dims in names.values() for n in dims or () if n}
    )
    what = "matches no parameter" if is_path else "names no dim of any parameter"
    if not is_path and any(tree.matches(key, name) for name in shapes):
        what += ", but matches paths, which take a PartitionSpec"
    shown = ", ".join(sorted(map(str, known))[:8]) or "none: the model is unannotated"
    return (
        f"rules: {key!r} {what}. Known {'paths' if is_path else 'names'}: {shown}."
        f"{tree.near_match(key, map(str, known))} Correct it or remove it."
    )
