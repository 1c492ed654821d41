"""Which published decoders can be read and written?"""

from jaxpar.models.decoder.config import DecoderConfig, num_params
from jaxpar.models.decoder.hf_config import READERS
from jaxpar.models.decoder.hf_leaves import is_parameter, leaves_of
from jaxpar.models.decoder.loss import decoder_loss
from jaxpar.models.decoder.model import make_decoder
from jaxpar.models.hf.families import Family

DECODERS = {
    kind: Family(
        read_fields=read,
        config=DecoderConfig,
        make_model=make_decoder,
        loss_fn=lambda config: decoder_loss,
        leaves=leaves_of,
        num_params=num_params,
        is_parameter=is_parameter,
    )
    for kind, read in READERS.items()
}
"""By model_type."""
