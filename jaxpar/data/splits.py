"""Which documents are held out where no held-out data is given?

A document is held out by a hash of its own content, so that it stays in its split when
others are added, and the same document elsewhere in the corpus is in the same split.
"""

HELD_OUT_SHARE = 0.05

_HASHES = 1 << 64


def is_heldout(content_hash: int, share: float) -> bool:
    """Whether a document is held out.

    Args:
      content_hash: 64 bits, equally distributed, of its content.
      share: of the documents that is held out, from 0 to 1.

    Returns:
      Whether it is one of that share.

    Example:
      >>> is_heldout(2**60, 0.05), is_heldout(2**59, 0.05)
      (False, True)
    """
    return content_hash < share * _HASHES


def require_share(share: float) -> None:
    """Raise ValueError unless a share leaves something for both splits."""
    if not 0 < share < 1:
        raise ValueError(
            f"heldout_share={share} must be above 0 and below 1, such as "
            f"{HELD_OUT_SHARE}; it is for data without heldout=."
        )
