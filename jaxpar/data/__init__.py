"""Where do batches come from: token files, read in place and shuffled by Grain."""

from jaxpar.data.loader import Loader
from jaxpar.data.splits import open_splits
from jaxpar.data.stdlib import stdlib_source
from jaxpar.data.tokens import Tokens, read_tokens

__all__ = ["Loader", "Tokens", "open_splits", "read_tokens", "stdlib_source"]
