"""Are equal signatures checked by one checker, and others by their own?"""

from collections.abc import Callable
from typing import Any, Literal

import pytest
from jaxtyping import TypeCheckError, jaxtyped
from jaxtyping._import_hook import Typechecker

from tests.type_checks import once_a_signature


def make() -> Callable[..., Any]:
    def inner(x: int, y: Literal[1] = 1, *, z: str = "a") -> bool:
        return bool((x, y, z))

    return inner


def test_one_checker_is_written_for_equal_signatures():
    written: list[Any] = []
    check = once_a_signature(lambda fn: written.append(fn) or fn)
    assert check(make()) is check(make())
    assert len(written) == 1


def as_float(x: float, y: Literal[1] = 1, *, z: str = "a") -> bool: ...


def as_bool(x: int, y: Literal[True] = True, *, z: str = "a") -> bool: ...


def other_name(a: int, y: Literal[1] = 1, *, z: str = "a") -> bool: ...


def other_default(x: int, y: Literal[1] = 1, *, z: str = "b") -> bool: ...


def positional(x: int, y: Literal[1] = 1, z: str = "a") -> bool: ...


def required(x: int, y: Literal[1], *, z: str = "a") -> bool: ...


def other_result(x: int, y: Literal[1] = 1, *, z: str = "a") -> int: ...


OTHERS = (
    as_float,
    as_bool,
    other_name,
    other_default,
    positional,
    required,
    other_result,
)


@pytest.mark.parametrize("other", OTHERS, ids=lambda fn: fn.__name__)
def test_another_signature_has_its_own_checker(other):
    check = once_a_signature(lambda fn: fn)
    first = make()
    assert check(first) is first
    assert check(other) is other


LARGE = object()


def test_default_that_may_be_large_is_not_kept():
    check = once_a_signature(lambda fn: fn)
    for _ in range(2):

        def inner(x: Any = LARGE) -> None: ...

        assert check(inner) is inner


def test_functions_made_twice_are_checked_both_times():
    assert Typechecker.lookup, "pytest runs with --jaxtyping-packages"
    for check in Typechecker.lookup.values():
        for _ in range(2):
            with pytest.raises(TypeCheckError, match="parameter 'x'"):
                jaxtyped(make(), typechecker=check)("no number")
