"""What is attention given besides queries, keys, values and a plan."""

import dataclasses

import jax
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Limits:
    """Which keys a query may see, by what is only known when the program runs.

    Attributes:
      segments_q: a query sees only keys of its own segment; None for one segment.
      segments_k: the segment of each key; None for one segment.
      kv_seq_lens: keys of each sequence that are there; None for all.
      first_head: which of the plan's heads is the first here; None where all are here.
    """

    segments_q: Int[Array, "B T"] | None = None
    segments_k: Int[Array, "B S"] | None = None
    kv_seq_lens: Int[Array, "B"] | None = None
    first_head: Int[Array, ""] | None = None
