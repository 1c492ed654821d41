"""How do the operations of an NNX model carry the names of its modules?

Linen calls every module in a `jax.named_scope` of its name; NNX does not. Scopes change
the metadata of a program and nothing else: profilers show them, and
`jaxpar.compiled.modules` reads them.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import Any, Generic

import jax
from flax import nnx

_ACTIVE: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar(
    "active", default=()
)
"""The path of the module that is being called."""

_KNOWN = {*nnx.Module.__mro__, nnx.Object, Generic}
"""Classes that a subclass may be made of: they do no more than register it."""


@contextlib.contextmanager
def named_calls(model: nnx.Module) -> Iterator[None]:
    """Call the modules below a model in scopes of their paths, within the block.

    Python looks ``__call__`` up on the class, so that each module is an instance of a
    subclass of its own within the block: ``isinstance`` is true as before, ``type(x) is
    Linear`` is not. The user's classes are not changed. Modules whose classes run code
    of the user's when they get a subclass have no scopes.
    """
    modules = [(m, type(m), tuple(map(str, p))) for p, m in nnx.iter_modules(model)]
    active = _ACTIVE.set(())
    try:
        for module, kind, path in modules:
            if path and callable(module) and _is_plain(kind):
                object.__setattr__(module, "__class__", _scoped(kind, path))
        yield
    finally:
        _ACTIVE.reset(active)
        for module, kind, _ in modules:
            object.__setattr__(module, "__class__", kind)


def _is_plain(kind: type) -> bool:
    """Whether nobody's code runs when the class gets a subclass."""
    watched = any("__init_subclass__" in vars(x) for x in {*kind.__mro__} - _KNOWN)
    return not watched and type(kind) is type(nnx.Module)


@functools.cache
def _scoped(kind: type, path: tuple[str, ...]) -> type:
    """A subclass whose calls run in the scope of a path."""

    @functools.wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        around = _ACTIVE.get()
        is_below = path[: len(around)] == around
        name = "/".join(path[len(around) :] if is_below else path)
        # A module that calls itself again, or `super().__call__`, has its scope.
        with jax.named_scope(name) if name else contextlib.nullcontext():
            token = _ACTIVE.set(path)
            try:
                return kind.__call__(self, *args, **kwargs)
            finally:
                _ACTIVE.reset(token)

    names = {"__call__": call, "__module__": kind.__module__, "__doc__": kind.__doc__}
    names["__qualname__"] = kind.__qualname__
    is_pytree = kind._pytree__is_pytree
    return type(kind)(kind.__name__, (kind,), names, pytree=is_pytree)
