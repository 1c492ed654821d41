"""Public names, each with the module that it is loaded from when it is first used."""

from .batch_sizes import BatchWarmup
from .byte_pairs import encode, open_tokenizer, tokenize, train_tokenizer
from .corpus import DataConfig, open_corpus
from .curriculum import Curriculum
from .disk_array import ChangedDataError
from .files import read_tokens
from .growth import Growth, GrowthInSteps
from .growth_config import GrowthConfig
from .image_arrays import ImageArrays, load_digits
from .images import ImageFolder
from .loader import Loader
from .masking import MaskedRows, masked_shapes
from .mixture import Mixture
from .packing import PackedDocuments, batch_shapes, rows_of
from .prepared_images import PreparedImages, image_shapes, open_images
from .rows import RowSource
from .span_corruption import (
    SpanCorruption,
    require_whole_text,
    span_batch_shapes,
    span_lengths,
)
from .stdlib import stdlib_source
from .suites import SuitesConfig
from .tokens import Tokens
from .windows import Windows

__all__ = [
    "BatchWarmup",
    "ChangedDataError",
    "Curriculum",
    "DataConfig",
    "Growth",
    "GrowthConfig",
    "GrowthInSteps",
    "ImageArrays",
    "ImageFolder",
    "Loader",
    "MaskedRows",
    "Mixture",
    "PackedDocuments",
    "PreparedImages",
    "RowSource",
    "SpanCorruption",
    "SuitesConfig",
    "Tokens",
    "Windows",
    "batch_shapes",
    "encode",
    "image_shapes",
    "load_digits",
    "masked_shapes",
    "open_corpus",
    "open_images",
    "open_tokenizer",
    "read_tokens",
    "require_whole_text",
    "rows_of",
    "span_batch_shapes",
    "span_lengths",
    "stdlib_source",
    "tokenize",
    "train_tokenizer",
]
