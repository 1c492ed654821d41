"""Which published BERTs can be read and written?"""

from jaxpar.models.bert.config import BertConfig, num_bert_params
from jaxpar.models.bert.hf_config import describe_bert, read_bert
from jaxpar.models.bert.hf_leaves import HEADS, bert_leaves, is_bert_parameter
from jaxpar.models.bert.loss import make_bert_loss
from jaxpar.models.bert.model import make_bert
from jaxpar.models.hf.families import Family

BERTS = {
    "bert": Family(
        read_fields=read_bert,
        config=BertConfig,
        make_model=make_bert,
        loss_fn=make_bert_loss,
        leaves=bert_leaves,
        num_params=num_bert_params,
        is_parameter=is_bert_parameter,
        heads=HEADS,
        describe=describe_bert,
    )
}
"""By model_type."""
