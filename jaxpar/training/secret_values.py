"""Which of a run's settings are secrets, whose values its record must not have?"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar.config import HIDDEN

_ALWAYS = {"apikey", "credential", "credentials", "passphrase", "passwd", "password"}
_ALWAYS |= {"secret", "secrets"}
_OF_DATA = {"bos", "cls", "end", "eos", "mask", "pad", "sep", "special", "start", "unk"}
_OF_DATA |= {"column", "data", "feature", "field", "image", "input", "label", "output"}
_OF_DATA |= {"sort", "stop", "target", "text"}
"""Words before "token" and "key" that make them a tokenizer's, or a column of data."""

_IN_ADDRESS = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")


def is_secret(name: str) -> bool:
    """Whether a setting's name says that its value is a secret.

    Example:
      >>> [is_secret(name) for name in ("hf_token", "num_tokens", "eos_token", "keep")]
      [True, False, False, False]
    """
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name.rpartition(".")[2])
    *before, last = re.split(r"[^a-z0-9]+", spaced.lower())
    if _ALWAYS & {*before, last}:
        return True
    return last in ("token", "key") and not (before and before[-1] in _OF_DATA)


def without_secrets(value: Any, name: str = "") -> Any:
    """A setting, with the texts of secrets hidden.

    Args:
      value: of JSON's types.
      name: of the setting.
    """
    if isinstance(value, Mapping):
        return {k: without_secrets(each, str(k)) for k, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(each, name) for each in value]
    if not isinstance(value, str) or not value:
        return value
    return HIDDEN if is_secret(name) else _IN_ADDRESS.sub(HIDDEN, value)


def command_without_secrets(command: Sequence[str]) -> list[str]:
    """A command line, with the values of secret flags hidden.

    Example:
      >>> command_without_secrets(["--hf-token", "abc", "--key=d", "--keep", "3"])
      ['--hf-token', '(hidden)', '--key=(hidden)', '--keep', '3']
    """
    found: list[str] = []
    after = ""
    for word in command:
        flag, equals, _ = word.partition("=")
        is_flag = word.startswith("-")
        if equals and is_secret(flag):
            found.append(f"{flag}={HIDDEN}")
        else:
            found.append(without_secrets(word, "" if is_flag else after))
        after = word if is_flag and not equals else ""
    return found
