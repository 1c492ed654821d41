"""How is YAML written, so that every reader takes a string for a string?

PyYAML leaves text like ``1e-4`` or ``y`` bare, which Kubernetes' tools read as a number
and as true.
"""

import re
from collections.abc import Sequence
from typing import Any

import yaml

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_./-]+")
"""What may stand bare; words like ``yes`` PyYAML quotes by itself."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """Write what is there twice out twice, for those who read it."""
        return True


def _quoted(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = None if _WORD.fullmatch(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _quoted)


def yaml_text(documents: Sequence[Any]) -> str:
    """Write documents of dicts, lists, strings, numbers and booleans.

    Args:
      documents: one or more.

    Returns:
      The text; keys stay in their order, and long strings on one line.
    """
    return yaml.dump_all(
        documents, Dumper=_Dumper, sort_keys=False, width=10_000, explicit_start=True
    )
