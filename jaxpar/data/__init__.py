"""Where do batches come from: text or token files, tokenized, and shuffled by Grain."""

from jaxpar.data.byte_pairs import encode, open_tokenizer, tokenize, train_tokenizer
from jaxpar.data.loader import Loader
from jaxpar.data.splits import open_splits
from jaxpar.data.stdlib import stdlib_source
from jaxpar.data.tokens import Tokens, read_tokens
from jaxpar.lazy import load_modules

__all__ = [
    "Loader",
    "Tokens",
    "encode",
    "open_splits",
    "open_tokenizer",
    "read_tokens",
    "stdlib_source",
    "tokenize",
    "train_tokenizer",
]

load_modules(globals())
