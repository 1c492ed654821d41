"""Is a share of documents held out, whatever else is in the corpus?"""

import pytest
import xxhash

from jaxpar.data.splits import is_heldout, require_share


@pytest.mark.parametrize("share", [0.01, 0.05, 0.5])
def test_share_of_documents_is_held_out(share):
    hashes = [xxhash.xxh3_64_intdigest(b"document %d" % i) for i in range(20_000)]
    held = sum(is_heldout(each, share) for each in hashes)
    assert held / len(hashes) == pytest.approx(share, rel=0.2)


def test_share_of_nothing_holds_nothing_out():
    assert not is_heldout(0, 0.0)
    assert is_heldout(2**64 - 1, 1.0)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 5.0])
def test_share_that_empties_a_split_raises(share):
    with pytest.raises(ValueError, match=f"heldout_share={share} must be above 0 and"):
        require_share(share)
