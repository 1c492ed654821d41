"""Where do batches come from: data in any format, tokenized, and shuffled by Grain."""

from jaxpar.data.batch_sizes import BatchWarmup
from jaxpar.data.byte_pairs import encode, open_tokenizer, tokenize, train_tokenizer
from jaxpar.data.corpus import DataConfig, open_corpus
from jaxpar.data.curriculum import Curriculum
from jaxpar.data.disk_array import ChangedDataError
from jaxpar.data.files import read_tokens
from jaxpar.data.growth import Growth, GrowthInSteps
from jaxpar.data.growth_config import GrowthConfig
from jaxpar.data.image_arrays import ImageArrays, load_digits
from jaxpar.data.images import ImageFolder
from jaxpar.data.loader import Loader
from jaxpar.data.masking import MaskedRows, masked_shapes
from jaxpar.data.mixture import Mixture
from jaxpar.data.packing import PackedDocuments, batch_shapes, rows_of
from jaxpar.data.prepared_images import PreparedImages, image_shapes, open_images
from jaxpar.data.rows import RowSource
from jaxpar.data.span_corruption import (
    SpanCorruption,
    require_whole_text,
    span_batch_shapes,
    span_lengths,
)
from jaxpar.data.stdlib import stdlib_source
from jaxpar.data.suites import SuitesConfig
from jaxpar.data.tokens import Tokens
from jaxpar.data.windows import Windows
from jaxpar.lazy import load_modules

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

load_modules(globals())
