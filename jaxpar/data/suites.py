"""Which held-out sets is a run evaluated on, beside its own held-out data?"""

import dataclasses

from tokenizers import Tokenizer

from jaxpar.data.byte_pairs import encode
from jaxpar.data.corpus import Corpus, DataConfig, require_same_kind
from jaxpar.data.files import find_corpus
from jaxpar.data.tokens import Tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuitesConfig(DataConfig):
    """Fields of a recipe's config that evaluates on several held-out sets."""

    suites: tuple[str, ...] = ()
    """More held-out sets, each NAME=FILE or NAME=FOLDER; their losses have the name."""

    def open_data(self, *, pack: bool | None = None) -> Corpus:
        """As `DataConfig.open_data`; also checks the form of `suites`."""
        _read_suites(self.suites)
        return super().open_data(pack=pack)

    def open_suites(
        self, heldout: Tokens, tokenizer: Tokenizer | None, vocab_size: int
    ) -> dict[str, Tokens]:
        """Open the held-out sets, as the run reads its data.

        Args:
          heldout: the run's own held-out data.
          tokenizer: of the run; None for bytes and token ids.
          vocab_size: of the model.

        Returns:
          Name -> tokens; first `heldout`, whose name is "".

        Raises:
          ValueError: if a suite is not NAME=PATH, two have one name, or one can't be
            read, is of another kind than the data or has more different ids.
          FileNotFoundError: if there is no such file.
        """
        found = {"": heldout}
        kind = find_corpus(self.data)[1] if self.data else "text"
        for name, path in _read_suites(self.suites).items():
            try:
                files, own_kind = find_corpus((path,))
                of_data = self.data[0] if self.data else "the standard library"
                require_same_kind(files[0][0], own_kind, of_data, kind)
                found[name] = self._open_suite(path, tokenizer)
                found[name].require_vocabulary(vocab_size)
            except (ValueError, FileNotFoundError) as error:
                known = ValueError if isinstance(error, ValueError) else type(error)
                said = str(error).removeprefix("paths: ")
                raise known(f"suites={name}={path}: {said}") from error
        return found

    def _open_suite(self, path: str, tokenizer: Tokenizer | None) -> Tokens:
        """All of the data in a path."""
        whole = dataclasses.replace(self, suites=(), data=(path,), heldout=(path,))
        tokens = whole.open_data().heldout
        if tokenizer is None or self.tokenizer is not None:
            return tokens
        encoded = encode(tokenizer, tokens, cache=self.data_cache)
        return dataclasses.replace(encoded, is_heldout=True)


def _read_suites(suites: tuple[str, ...]) -> dict[str, str]:
    """Name -> path of suites, NAME=PATH each."""
    found: dict[str, str] = {}
    for each in suites:
        name, _, path = each.partition("=")
        if not name or not path:
            raise ValueError(
                f"suites={each!r} must be NAME=PATH, such as 'code=heldout/code.jsonl'."
            )
        if name in found:
            raise ValueError(
                f"suites={each!r} has the name of {found[name]!r} too; give each set "
                "its own."
            )
        found[name] = path
    return found
