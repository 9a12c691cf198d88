"""What a request says in text, as the engine takes it: bad words and grammars become token ids."""

from collections.abc import Sequence

from .errors import RequestError
from .tokenizer import Tokenizer


def bad_word_ids(tokenizer: Tokenizer | None, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Sequences of tokens that `Sampling.bad_words` rules out, for words in text.

    A word is ruled out as it is encoded at the start of a text and after a blank, since tokens of most words begin with
    the blank before them. Blanks around it do not count. It can still be written with other tokens than those: the
    rules know tokens, not text.

    Raises:
      RequestError: a word of blanks, or no tokenizer.
    """
    if isinstance(words, str) or not all(isinstance(word, str) and word.strip() for word in words):
        raise RequestError("bad_words", f"found {words!r}, expected a list of texts of more than blanks")
    if not words:
        return ()
    if tokenizer is None:
        raise RequestError("bad_words", "the checkpoint has no tokenizer files to encode words with; use Sampling")
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        alone, after_blank = (tuple(tokenizer.encode(blank + word.strip())) for blank in ("", " "))
        found[alone] = None
        if after_blank[-len(alone) :] != alone:  # else it ends as the word alone does, which is ruled out anywhere
            found[after_blank] = None
    return tuple(found)
