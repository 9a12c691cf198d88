"""What a request says in text, as the engine takes it: bad words and grammars become token ids."""

import dataclasses
from collections.abc import Sequence

from .engine.request import Request
from .errors import RequestError
from .grammar import Grammars, GrammarSpec
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
        raise RequestError("bad_words", "the checkpoint has no tokenizer files to encode words with; use token ids")
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        alone, after_blank = (tuple(tokenizer.encode(blank + word.strip())) for blank in ("", " "))
        found[alone] = None
        if after_blank[-len(alone) :] != alone:  # else it ends as the word alone does, which is ruled out anywhere
            found[after_blank] = None
    return tuple(found)


def with_grammar(
    request: Request, spec: GrammarSpec, tokenizer: Tokenizer, grammars: Grammars, *, raw: bool
) -> Request:
    """The request, held to a grammar. Each of several answers needs its own: its tokens move the grammar.

    Args:
      request: checked, not yet in an engine. A prompt that ends in `<think>` leaves the reasoning free, and the grammar
        binds what follows it.
      spec: the grammar.
      tokenizer, grammars: of the model.
      raw: a text completion, where think tokens are text like any other.
    Raises:
      RequestError: a grammar that cannot be honoured, or a setting that leaves nothing to draw where it is complete.
    """
    if request.sampling.min_tokens:
        expected = f"0: an answer whose form `{spec.field}` sets ends where that is complete"
        raise RequestError("min_tokens", f"found {request.sampling.min_tokens}, expected {expected}")
    names = {} if raw else tokenizer.special_ids
    begin, end = names.get("<think>"), names.get("</think>")
    thinking = begin is not None and request.prompt[-1] == begin
    constraint = grammars.constraint(spec, request.stop_ids, think_end=end, thinking=thinking)
    return dataclasses.replace(request, constraint=constraint)
