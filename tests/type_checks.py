"""How are jaxpar's annotations checked? By beartype, once for all equal signatures.

jaxtyping has beartype write a checker for every function that is made. jaxpar makes
functions within functions, anew for each engine: writing the checkers of equal
signatures again took a quarter of the time in which an engine is made.
"""

from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any

from jaxtyping._import_hook import Typechecker

PLAIN = (bool, int, float, str, type(None))
"""Types of the defaults that may be kept: no array, no engine."""


def share_checkers() -> None:
    """Have the import hook's type checkers write each checker once."""
    for name, check in Typechecker.lookup.items():
        Typechecker.lookup[name] = once_a_signature(check)


def once_a_signature(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Call ``check`` once for functions that differ in nothing that it sees.

    It is given functions without a body, with the signature of what is checked.
    """
    checkers: dict[Hashable, Any] = {}

    def checker_of(fn: Any) -> Any:
        try:
            key = signature_of(fn)
            found = checkers.get(key)
        except TypeError:  # An annotation without a hash.
            return check(fn)
        if key is None:
            return check(fn)
        if found is None:
            found = checkers[key] = check(fn)
        return found

    return checker_of


def signature_of(fn: Any) -> Hashable:
    """Names, kinds, annotations and defaults; None where a default isn't plain."""
    if not isinstance(fn, FunctionType):
        return None
    named = fn.__kwdefaults__ or {}
    defaults = (*(fn.__defaults__ or ()), *named.values())
    if not all(type(each) in PLAIN for each in defaults):
        return None
    code = fn.__code__
    return (
        code.co_varnames,
        code.co_posonlyargcount,
        code.co_argcount,
        code.co_kwonlyargcount,
        code.co_flags,
        code.co_code,
        tuple(fn.__annotations__.items()),
        tuple(map(type, defaults)),
        defaults,
        tuple(named),
    )
