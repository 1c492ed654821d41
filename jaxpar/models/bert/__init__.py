"""BERT: an encoder, its losses, and the published models."""

from jaxpar.lazy import load_modules
from jaxpar.models.bert.config import BertConfig, num_bert_params
from jaxpar.models.bert.loss import (
    make_bert_loss,
    masked_word_accuracy,
    pretraining_batch,
)
from jaxpar.models.bert.model import make_bert

__all__ = [
    "BertConfig",
    "make_bert",
    "make_bert_loss",
    "masked_word_accuracy",
    "num_bert_params",
    "pretraining_batch",
]

load_modules(globals())
