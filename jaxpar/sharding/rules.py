"""Which mesh axis splits each dim of a leaf: from names and rules to specs.

A model may name the dims of its parameters (``("embed", "mlp")``); `rules` map those
names, or the paths of leaves, to mesh axes. A model written for a mesh uses axis names
instead (`AXIS_NAMES`), or Flax's own rules. A dim that no rule matches is unsharded
while it is computed on; ZeRO decides how it is stored (`jaxpar.sharding.zero`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from jaxpar import tree
from jaxpar.mesh import BATCH_AXES, EXPERT, PIPE, TENSOR
from jaxpar.sharding.tensor import AXIS_NAMES, LOGICAL_RULES, VOCAB

Rules = Mapping[str, str | tuple[str, ...] | P | None]
"""Logical name -> "tensor", "expert", ("pipe", "tensor") for a vocabulary, or None; and
path pattern -> PartitionSpec."""

AxisRules = Sequence[tuple[str, Any]]
"""Flax's ``logical_axis_rules``: pairs of a logical name and mesh axes (one, several or
None); of two rules for a name, the first whose axes are free in an array applies."""

RULED = (TENSOR, EXPERT)
"""The axes that rules may name."""

Spec = tuple[str | tuple[str, ...] | None, ...]
"""One mesh axis, several, or None per dim."""


def compute_specs(
    shapes: Mapping[str, tuple[int, ...]],
    names: Mapping[str, Sequence[Any] | None],
    rules: Rules,
    sizes: Mapping[str, int],
    axis_rules: AxisRules = (),
) -> dict[str, Spec]:
    """Choose the compute spec of every leaf.

    Path rules win over logical names; among path rules the first match wins.

    Args:
      shapes: leaf name -> shape.
      names: leaf name -> the model's names for its dims, or None.
      rules: the user's rules.
      sizes: mesh axis -> devices on it.
      axis_rules: Flax's rules; if there are any, they replace `LOGICAL_RULES`.

    Returns:
      leaf name -> one entry per dim.

    Raises:
      ValueError: for an unknown axis in a rule, a rule that matches nothing, a spec
        that does not fit its leaf, a dim that its axis does not divide, or a name
        without a rule where tensor or pipe is more than 1.

    Example:
      >>> compute_specs({"w": (4, 8)}, {"w": ("embed", "mlp")}, {}, {"tensor": 2})
      {'w': (None, 'tensor')}
    """
    rules = {key: _on_axes(key, value) for key, value in rules.items()}
    paths = {key: spec for key, spec in rules.items() if isinstance(spec, P)}
    logical = {key: axis for key, axis in rules.items() if key not in paths}
    specs, used, unknown = {}, set(), {}
    for leaf, shape in shapes.items():
        own = names.get(leaf) or ()
        fits = [pattern for pattern in paths if tree.matches(pattern, leaf)]
        used.update(fits, flat_names(own))
        if fits:
            spec = _padded(fits[0], paths[fits[0]], leaf, shape)
        else:
            known = _flax_axes(own, axis_rules) if axis_rules else LOGICAL_RULES
            known = {**known, **logical}
            spec = _from_names(leaf, shape, own, known, unknown)
        spec = tuple(_on_mesh(leaf, entry, sizes) for entry in spec)
        _check_divides(leaf, shape, spec, sizes)
        specs[leaf] = spec
    for key in rules:
        if key not in used:
            raise ValueError(_unused(key, key in paths, shapes, names))
    if unknown and any(sizes.get(axis, 1) > 1 for axis in VOCAB):
        raise ValueError(_unknown(unknown, {**LOGICAL_RULES, **logical}))
    return specs


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes of one entry of a spec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def flat_names(names: Sequence[Any]) -> Iterator[str]:
    """The names of all dims; one dim may have several."""
    for name in names:
        if isinstance(name, tuple | list):
            yield from flat_names(name)
        elif name is not None and name is not P.UNCONSTRAINED:
            yield name


def _on_axes(key: str, value: Any) -> Any:
    """A rule's value, with jaxpar's names of the mesh axes."""
    if isinstance(value, P):
        return P(*(_on_axes(key, entry) for entry in value))
    if value is None or value == VOCAB:
        return value
    axis = AXIS_NAMES.get(value)
    if axis in RULED:
        return axis
    if axis == PIPE:
        raise ValueError(_not_alone(key))
    if axis in BATCH_AXES:
        raise ValueError(
            f"rules: {key!r} maps to {value!r}, but parameters are sharded over data "
            "by zero=1, 2 or 3, not by rules. Use 'tensor', 'expert' or None."
        )
    raise ValueError(
        f"rules: {key!r} maps to {value!r}, which is not a mesh axis. Use 'tensor', "
        f"'expert' or None.{tree.near_match(str(value), RULED, cutoff=0.8)}"
    )


def _not_alone(key: str) -> str:
    return (
        f"rules: {key!r} maps to 'pipe'; only 'tensor' and 'expert' can split a "
        "layer. Use one of them or None."
    )


def _padded(pattern: str, spec: P, name: str, shape: tuple[int, ...]) -> Spec:
    if len(spec) > len(shape):
        raise ValueError(
            f"rules: {pattern!r} gives {spec} to {name}, which has {len(shape)} dims "
            f"(shape {shape}). Give at most one entry per dim."
        )
    for axis in RULED:
        if tuple(spec).count(axis) > 1:
            raise ValueError(
                f"rules: {pattern!r} gives {spec} to {name}, but an axis can split "
                f"only one dim. Keep one {axis!r} and make the others None."
            )
    return tuple(spec) + (None,) * (len(shape) - len(spec))


def _flax_axes(names: Sequence[Any], axis_rules: AxisRules) -> dict[str, Any]:
    """Flax's assignment of one array's names; names without an axis are unsharded."""
    found: dict[str, Any] = {}
    for name, axes in axis_rules:
        taken = {axis for entry in found.values() for axis in flat_names((entry,))}
        if name in flat_names(names) and taken.isdisjoint(flat_names((axes,))):
            found.setdefault(name, axes)
    return {name: None for name in flat_names(names) if name not in AXIS_NAMES} | found


def _from_names(
    leaf: str,
    shape: tuple[int, ...],
    names: Sequence[Any],
    known: Mapping[str, Any],
    unknown: dict[str, list[str]],
) -> Spec:
    """The spec from a leaf's dim names; names without a rule go into `unknown`."""
    if len(names) > len(shape):
        raise ValueError(
            f"rules: the model names {len(names)} dims of {leaf}, {tuple(names)}, but "
            f"it has {len(shape)} (shape {shape}). Name each dim once, in its order."
        )
    spec: list[tuple[str, ...]] = []
    for name in names:
        found = set()
        for part in flat_names((name,)):
            for axis in flat_names((known.get(part, part),)):
                if axis in AXIS_NAMES:
                    found.add(AXIS_NAMES[axis])
                else:
                    unknown.setdefault(part, []).append(leaf)
        # ZeRO places data.
        axes = tuple(axis for axis in (EXPERT, *VOCAB) if axis in found)
        spec.append(() if found & {axis for entry in spec for axis in entry} else axes)
    return tuple(spec) + (None,) * (len(shape) - len(spec))


def _on_mesh(
    leaf: str, entry: str | tuple[str, ...] | None, sizes: Mapping[str, int]
) -> str | tuple[str, ...] | None:
    """Drop axes of one device from an entry of several axes."""
    axes = tuple(a for a in axes_of(entry) if a != EXPERT or sizes.get(a, 1) > 1)
    if EXPERT in axes and len(axes) > 1:
        raise ValueError(
            f"rules: {leaf} has a dim that {' x '.join(axes)} split; give experts a "
            "dim of their own, that 'expert' splits alone."
        )
    if axes == (PIPE,):
        if sizes.get(PIPE, 1) > 1:
            raise ValueError(_not_alone(leaf))
        return None
    if len(axes) < 2:
        return next(iter(axes), None)
    axes = tuple(axis for axis in axes if sizes.get(axis, 1) > 1)
    return axes if len(axes) > 1 else next(iter(axes), TENSOR)


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


def _unknown(unknown: Mapping[str, Sequence[str]], known: Mapping[str, Any]) -> str:
    """The error for names without a rule, for all leaves."""
    listed = []
    for name, leaves in unknown.items():
        others = f" and {len(leaves) - 1} more" if len(leaves) > 1 else ""
        guess = tree.near_match(name, known, cutoff=0.8).replace(" D", "; d", 1)
        listed.append(f"{name!r} ({leaves[0]}{others}{guess})")
    whole = ", ".join(f"{name!r}: None" for name in unknown)
    return (
        "rules: the model gives dims names that no rule knows: "
        f"{', '.join(listed)}. Pass rules={{{whole}}} to leave those dims unsharded, "
        "'tensor' for None to split one; with tensor=1 and pipe=1 no name needs a rule."
    )


def _unused(key, is_path, shapes, names) -> str:
    known = (
        shapes
        if is_path
        else {n for own in names.values() for n in flat_names(own or ())}
    )
    what = "matches no parameter" if is_path else "names no dim of any parameter"
    if not is_path and any(tree.matches(key, name) for name in shapes):
        what += ", but matches paths, which take a PartitionSpec"
    shown = ", ".join(sorted(map(str, known))[:8]) or "none: the model is unannotated"
    return (
        f"rules: {key!r} {what}. Known {'paths' if is_path else 'names'}: {shown}."
        f"{tree.near_match(key, map(str, known))} Correct it or remove it."
    )
