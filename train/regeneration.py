"""A conversation as far as the target has answered it."""

from .answers import Answer, AnswerFile
from .conversations import Conversation, Message


class Regeneration:
    """A conversation as far as it is answered.

    Attributes:
      conversation: as in the file.
      answers: one for each turn that was asked.
      messages: up to the next turn to ask, the answers in place of the file's own.
      unasked: why the turns after the answered ones are not asked; empty while they are.
    """

    def __init__(self, conversation: Conversation, tool_call: int | None) -> None:
        """
        Args:
          conversation: to answer anew.
          tool_call: the token that begins tool calls, in targets that have one.
        """
        self.conversation = conversation
        self.answers: list[Answer] = []
        self.messages: list[Message] = list(conversation.messages[: conversation.turns[0]])
        self.unasked = ""
        self._tool_call = tool_call

    @staticmethod
    def replay(conversation: Conversation, answers: AnswerFile, tool_call: int | None) -> "Regeneration":
        """The state after the answers that there are."""
        state = Regeneration(conversation, tool_call)
        while state.open:
            answer = answers.get(conversation.id, state.turn)
            if answer is None:
                break
            state.take(answer)
        return state

    @property
    def turn(self) -> int:
        """The next turn to ask."""
        return len(self.answers)

    @property
    def open(self) -> bool:
        """Whether there is a turn to ask."""
        return self.turn < len(self.conversation.turns) and not self.unasked

    def take(self, answer: Answer) -> None:
        """Go on to the next turn."""
        at = self.conversation.turns[self.turn]
        self.answers.append(answer)
        if not answer.good:
            self.unasked = f"turn {answer.turn} has no answer"
            return
        own = self.conversation.messages[at]
        said: Message = {"role": "assistant", "content": answer.text}
        if answer.reasoning:
            said["reasoning_content"] = answer.reasoning
        if own.get("tool_calls"):
            said = own  # what follows are the results of these very calls
        elif self._tool_call in answer.ids:
            self.unasked = f"turn {answer.turn} calls tools, whose results nobody knows"
        end = self.conversation.turns[self.turn] if self.turn < len(self.conversation.turns) else at + 1
        self.messages += [said, *self.conversation.messages[at + 1 : end]]

    @property
    def good(self) -> list[Answer]:
        """The answers to learn from: all, or all but the last."""
        return [answer for answer in self.answers if answer.good]

    @property
    def regenerated(self) -> Conversation:
        """The conversation up to its last good answer."""
        n = 1 + self.conversation.turns[len(self.good) - 1]
        c = self.conversation
        return Conversation(c.id, c.dataset, tuple(self.messages[:n]), c.tools)
