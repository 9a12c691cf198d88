"""Conversations to token documents whose loss mask is exactly what serving generates.

The server renders the messages before a turn, adds the template's generation prompt, and draws tokens up to an end
mark: these tokens are the turn's answer, and all before them is its prompt, `<think>` included where the generation
prompt ends in it. Turns share a document as long as each one, prompt and answer, begins the next one's prompt; where
the template rewrites earlier turns, as Kimi-K2.5's does when it drops their reasoning, a new document begins.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kimijax.chat import ChatTemplate
from kimijax.errors import RequestError, TemplateError
from kimijax.tokenizer import Tokenizer

from .conversations import Conversation, Message

type Ids = tuple[int, ...]
type TurnMode = Literal["auto", "all", "last"]

_MARKS = ("<|im_assistant|>", "<|im_middle|>", "<|im_end|>")


class TurnError(ValueError):
    """A conversation whose turns the template does not render as the server generates them."""


@dataclass(frozen=True)
class Turn:
    """What one answer is given to, and the answer with its end mark, as token ids."""

    prompt: Ids
    answer: Ids

    @property
    def ids(self) -> Ids:
        return self.prompt + self.answer


@dataclass(frozen=True)
class Document:
    """A sequence of its own.

    Attributes:
      ids: the tokens.
      spans: [start, stop) of each generated stretch, in order.
    """

    ids: Ids
    spans: tuple[tuple[int, int], ...]

    def cut(self, max_tokens: int) -> "Document":
        """The first `max_tokens` tokens."""
        kept = ((start, min(stop, max_tokens)) for start, stop in self.spans)
        return Document(self.ids[:max_tokens], tuple((a, b) for a, b in kept if a < b))

    @property
    def trains(self) -> bool:
        """Whether any row counts in the loss: that takes two tokens of an answer, the one fed and the one predicted."""
        return any(stop - start > 1 for start, stop in self.spans)


class TurnEncoder:
    """A target's template and tokenizer, with thinking on or off."""

    def __init__(self, chat: ChatTemplate, tokenizer: Tokenizer, *, thinking: bool, name: str) -> None:
        """
        Args:
          chat: the target's template.
          tokenizer: the target's.
          thinking: the template's argument. Without it the reasoning of earlier turns and of answers is left out.
          name: of the target, for errors.
        Raises:
          TemplateError: the target's turns have no marks, or its generation prompt does not begin its answers.
        """
        self._chat, self._tokenizer, self._thinking = chat, tokenizer, thinking
        missing = [mark for mark in _MARKS if mark not in tokenizer.special_ids]
        if missing:
            raise TemplateError(f"{name}: the tokenizer has no {missing}, by which an assistant's turn is found")
        self._assistant, self._middle, self._end = (tokenizer.special_ids[mark] for mark in _MARKS)
        self._think, self._end_think = (tokenizer.special_ids.get(mark) for mark in ("<think>", "</think>"))
        probe = Conversation("probe", name, ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}))
        try:
            self.turns(probe)
        except TurnError as e:
            raise TemplateError(f"{name}: the chat template cannot be trained with: {e}") from e

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Ids:
        """What the server would feed to answer these messages.

        Raises:
          TurnError: they cannot be rendered.
        """
        return self._encode(messages, tools, add_generation_prompt=True)[0]

    def turns(self, conversation: Conversation) -> list[Turn]:
        """Each assistant turn with its prompt, in order.

        Raises:
          TurnError: the conversation cannot be rendered, or a turn not as it would be generated.
        """
        found: list[Turn] = []
        for i in conversation.turns:
            prompt = self.prompt(conversation.messages[:i], conversation.tools)
            found.append(Turn(prompt, self._answer(prompt, conversation, i)))
        return found

    def _answer(self, prompt: Ids, conversation: Conversation, i: int) -> Ids:
        """What would have been generated after `prompt` to give message i."""
        ids, span = self._encode(conversation.messages[: i + 1], conversation.tools, add_generation_prompt=False)
        if span is None:
            raise TurnError(f"messages[{i}]: the template renders no turn")
        head = _from_last(prompt, self._assistant)
        n_opening = len(head) - (head.index(self._middle) + 1) if self._middle in head else -1
        turn = _from_last(ids[: span[1]], self._assistant)
        if n_opening < 0 or turn[: len(head)] != head:
            found, expected = (self._tokenizer.decode(part) for part in (turn[: len(head)], head))
            raise TurnError(f"messages[{i}]: the turn begins with {found!r}, the generation prompt is {expected!r}")
        body = turn[len(head) - n_opening :]
        reasoning = conversation.messages[i].get("reasoning_content") if self._thinking else None
        # A finished turn is rendered without its reasoning, since the next prompt will not have it. It was generated.
        if reasoning and self._think is not None and body[:2] == (self._think, self._end_think):
            body = (self._think, *self._tokenizer.encode(reasoning), *body[1:])
        return body[n_opening:]

    def _encode(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
    ) -> tuple[Ids, tuple[int, int] | None]:
        """Token ids of a rendering, and the span of its last assistant turn."""
        if not self._thinking:
            messages = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]
        try:
            encoded = self._chat.encode(
                messages, list(tools) or None, thinking=self._thinking, add_generation_prompt=add_generation_prompt
            )
        except (RequestError, TemplateError) as e:
            raise TurnError(str(e)) from e
        return encoded.ids, encoded.spans[-1] if encoded.spans else None


def join(turns: Sequence[Turn], mode: TurnMode) -> list[Document]:
    """Documents of a conversation's turns, each turn in the mask of exactly one.

    Args:
      turns: in order.
      mode: auto, as few documents as the template allows; all, one document; last, only the last turn.
    Raises:
      TurnError: mode all, and an earlier turn is not rendered as it was generated.
    """
    found: list[Document] = []
    for turn in turns[-1:] if mode == "last" else turns:
        span = (len(turn.prompt), len(turn.ids))
        if found and turn.prompt[: len(found[-1].ids)] == found[-1].ids:
            found[-1] = Document(turn.ids, (*found[-1].spans, span))
        else:
            found.append(Document(turn.ids, (span,)))
    if mode == "all" and len(found) > 1:
        raise TurnError("an earlier turn is rendered otherwise than it was generated")
    return found


def _from_last(ids: Ids, mark: int) -> Ids:
    """The end of `ids` from the last `mark` on; nothing where there is none."""
    at = next((i for i in range(len(ids) - 1, -1, -1) if ids[i] == mark), len(ids))
    return ids[at:]
