"""What is attention given besides queries, keys, values and tile work."""

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Limits:
    """Which keys a query may see, by what is only known when the program runs.

    Integer arrays; unannotated, for as a tree of cotangents it holds none.

    Attributes:
      segments_q: [B, T], or [tiles, B, tokens of a tile]: a query sees only keys of its
        own segment; None for one segment.
      segments_k: [B, S], likewise: the segment of each key; None for one segment.
      kv_seq_lens: [B]: how many keys each sequence has; None for all.
      first_head: scalar: which head of the tile work is the first here; None where all
        heads are here.
    """

    segments_q: Any = None
    segments_k: Any = None
    kv_seq_lens: Any = None
    first_head: Any = None
