"""Which configs of a BERT are refused, and how many parameters have the others?"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpar.models import make_bert
from jaxpar.models.bert.config import TASKS, BertConfig, num_bert_params
from jaxpar.sparse_attention import LocalSlidingWindow

LARGE = {"num_layers": 24, "num_heads": 16, "width": 1024}
COUNTS = {
    "pretraining": (110_106_428, 336_226_108),
    "masked": (109_514_298, 335_174_458),
    "sequence": (109_483_778, 335_143_938),
    "tokens": (108_893_186, 334_094_338),
}
WRONG = [
    ({"width": 0}, r"width=0 must be at least 1"),
    ({"type_vocab_size": 0}, r"type_vocab_size=0 must be at least 1"),
    ({"width": 32}, r"width=32 must be a multiple of num_heads=12 \(the nearest is 36"),
    ({"dropout": 1.0}, r"dropout=1.0 must be at least 0 and below 1"),
    ({"norm_epsilon": 0.0}, r"norm_epsilon=0\.0 must be above 0"),
    ({"num_labels": 1}, r"num_labels=1 must be at least 2"),
    ({"unroll": 13}, r"unroll=13 must be between 1 and num_layers=12"),
    ({"task": "token"}, r"task='token' must be one of .* Did you mean 'tokens'"),
    ({"activation": "gelu_exac"}, r"activation='gelu_exac' .* mean 'gelu_exact'"),
    ({"activation": "swiglu"}, r"'swiglu' has a gate, but the head of task='pretr"),
    ({"attention": "flash"}, r"attention='flash' must be one of 'auto', 'xla', 'cudnn"),
    ({"remat": "ful"}, r"policy='ful' must be one of .* Did you mean 'full'"),
    (
        {"remat": "save-names", "remat_names": ("mlp",)},
        r"remat_names='mlp' must be one of .* Did you mean 'mlp_hidden'",
    ),
    (
        {"attention": LocalSlidingWindow(num_heads=4)},
        r"LocalSlidingWindow\(num_heads=4\), but the model has num_heads=12",
    ),
    (
        {
            "attention": LocalSlidingWindow(num_heads=12, attention="unidirectional"),
        },
        r"hides the tokens behind each token, .* give it attention='bidirectional'",
    ),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_config_that_does_not_fit_is_refused(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        BertConfig(**fields)


@pytest.mark.parametrize("task", TASKS)
def test_base_and_large_have_their_numbers_of_parameters(task: str):
    """As transformers counts them on the meta device."""
    base, large = BertConfig(task=task), BertConfig(task=task, **LARGE)
    assert (num_bert_params(base), num_bert_params(large)) == COUNTS[task]


@pytest.mark.parametrize("task", TASKS)
def test_closed_form_counts_the_leaves(task: str):
    gated = {} if task in ("pretraining", "masked") else {"activation": "swiglu"}
    shape = {"num_layers": 3, "num_heads": 4, "width": 32, "mlp_width": 40}
    config = BertConfig(
        task=task, vocab_size=50, seq_len=7, num_labels=5, **shape, **gated
    )
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    params = jax.eval_shape(lambda: make_bert(config).init(0, tokens).params)
    assert num_bert_params(config) == sum(x.size for x in jax.tree.leaves(params))
