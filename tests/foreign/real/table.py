"""Which foreign programs are there?"""

from collections.abc import Callable, Mapping

from tests.foreign.real.adapters import (
    big_vision,
    bonsai,
    flax_graphs,
    flax_linen,
    flax_nnx,
    nanodo,
)
from tests.foreign.real.checkouts import Checkouts
from tests.foreign.real.programs import Program

PROGRAMS: Mapping[str, Callable[[Checkouts], Program]] = {
    "flax_imagenet": flax_linen.imagenet,
    "flax_vae": flax_linen.vae,
    "flax_lm1b": flax_linen.lm1b,
    "flax_seq2seq": flax_linen.seq2seq,
    "flax_sst2": flax_linen.sst2,
    "flax_ppo": flax_linen.ppo,
    "flax_ogbg": flax_graphs.graph_net,
    "flax_mnist": flax_nnx.mnist,
    "flax_gemma": flax_nnx.gemma,
    "nanodo": nanodo.gpt,
    "big_vision_vit": big_vision.vit,
    "big_vision_mixer": big_vision.mixer,
    "bonsai_qwen3": bonsai.qwen3,
    "bonsai_vit": bonsai.vit,
    "bonsai_unet": bonsai.unet,
    "bonsai_mamba2": bonsai.mamba2,
}
