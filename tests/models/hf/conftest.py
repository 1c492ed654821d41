"""The tests against transformers need the extra `oracle`: `make test-oracle`."""

import importlib.util

collect_ignore = (
    []
    if importlib.util.find_spec("transformers")
    else ["published.py", "test_decoders.py"]
)
