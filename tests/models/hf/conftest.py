"""Tests against transformers and timm need the extra `oracle`: `make test-oracle`."""

import importlib.util
from pathlib import Path

_THEIRS = ("published*.py", "comparing.py", "test_against_*.py")
_OF_TIMM = "*_coatnet.py"

collect_ignore = [
    path.name
    for pattern in _THEIRS
    for path in Path(__file__).parent.glob(pattern)
    if not importlib.util.find_spec("timm" if path.match(_OF_TIMM) else "transformers")
]
