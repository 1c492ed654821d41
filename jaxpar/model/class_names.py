"""What is a model called: by its classes, as its user named them."""

from jaxpar.model.axis_names import BoundNetwork
from jaxpar.model.bridge import Network
from jaxpar.model.network import PipelineNetwork
from jaxpar.model.several import SeveralNetworks


def class_names(network: Network) -> str:
    """The class of a model; of one of several parts, or of several models, of each.

    Args:
      network: the model as pure functions.

    Returns:
      Such as "GPT", "PipelineModel(Embed, Block, Head)", "actor: Mlp, critic: Mlp".
    """
    if isinstance(network, BoundNetwork):
        return class_names(network.network)
    if isinstance(network, PipelineNetwork):
        parts = map(class_names, network.parts.values())
        return f"PipelineModel({', '.join(dict.fromkeys(parts))})"
    if isinstance(network, SeveralNetworks):
        own = network.networks.items()
        return ", ".join(f"{name}: {class_names(each)}" for name, each in own)
    return getattr(network, "class_name", type(network).__name__)
