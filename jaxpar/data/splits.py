"""Which tokens are for training, and which are held out?"""

from collections.abc import Sequence

from jaxpar.data.stdlib import stdlib_source
from jaxpar.data.tokens import Tokens, read_tokens


def open_splits(
    data: Sequence[str] = (), heldout: Sequence[str] = ()
) -> tuple[Tokens, Tokens]:
    """Open the training and the held-out tokens.

    Args:
      data: text files or folders, or .bin or .npy files of tokens; empty for the
        standard library's source, with its own held-out files.
      heldout: the held-out ones; required exactly when `data` is given.

    Returns:
      (train, heldout).

    Raises:
      ValueError: if only one of the two is given.
      FileNotFoundError: if there is no such file.
    """
    if bool(data) != bool(heldout):
        raise ValueError(
            f"data={tuple(data)} and heldout={tuple(heldout)}: give both, or neither "
            "for the standard library's source."
        )
    if not data:
        return stdlib_source()
    return read_tokens(*data), read_tokens(*heldout)
