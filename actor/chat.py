"""Messages to token ids, by appending only.

The tokenizer's chat template renders a prompt once. What a later user message adds is rendered by
itself: the template's text between the end of an assistant message and the start of the next one,
so that prompt, sampled ids and added ids together are what the template gives for the whole
conversation, and no sampled text is ever tokenised.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from jinja2 import TemplateError

from headrace.environments.protocol import Message
from headrace.errors import ConfigError

_QUESTION = "question"
_ANSWER = "answer"


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    all_special_tokens: list[str]
    eos_token_id: int | None

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any:
        """Render messages to text when `tokenize` is false."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; special tokens in it become their ids."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any:
        """Text of token ids."""


class ChatFormat:
    """Renders the messages of an episode for one tokenizer.

    Attributes:
        end_of_turn: id of the token that closes a message.
        stop_token_ids: ids at which a model turn ends.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Find the template's end of turn and prove that the template can be appended to.

        Raises:
            ConfigError: there is no chat template or it fails, no single token closes a message, or
                a later message changes how an earlier one is rendered.
        """
        self._tokenizer = tokenizer
        self._special = sorted(set(tokenizer.all_special_tokens), key=len, reverse=True)
        asked = [Message(role="user", content=_QUESTION)]
        prompt = self._text(asked)
        answered = [*asked, Message(role="assistant", content=_ANSWER)]
        whole = self._text([*answered, Message(role="user", content=_QUESTION)])
        if not whole.startswith(prompt + _ANSWER):
            raise ConfigError(
                "the chat template renders an earlier message differently once a later one "
                "follows: episodes of several turns cannot be token-exact with it"
            )
        tail = self._encode(self._tail(_QUESTION))
        # Only behind a special token does text tokenise independently of what comes before it.
        if not tail or self._encode(self._decode_raw(tail[0])) != [tail[0]]:
            raise ConfigError("no single token closes a message in the chat template")
        if self._decode_raw(tail[0]) not in self._special:
            raise ConfigError(
                f"the chat template closes a message with {self._decode_raw(tail[0])!r}, which is "
                "not a special token of the tokenizer"
            )
        self.end_of_turn = tail[0]
        stops = {self.end_of_turn}
        if tokenizer.eos_token_id is not None:
            stops.add(tokenizer.eos_token_id)
        self.stop_token_ids = sorted(stops)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the prompt, up to where the model's first turn begins.

        Raises:
            ConfigError: the template refuses the messages.
        """
        return self._encode(self._text(messages))

    def reply(self, content: str) -> list[int]:
        """Token ids that follow the end-of-turn token when the user says `content`."""
        return self._encode(self._tail(content))[1:]

    def action(self, sampled: list[int]) -> str:
        """Text of a model turn, without special tokens; only ever read, never encoded again."""
        text: str = self._tokenizer.decode(sampled, skip_special_tokens=True)
        return text

    def _tail(self, content: str) -> str:
        asked = [
            Message(role="user", content=_QUESTION),
            Message(role="assistant", content=_ANSWER),
        ]
        before = self._text(asked[:1]) + _ANSWER
        return self._text([*asked, Message(role="user", content=content)])[len(before) :]

    def _text(self, messages: Sequence[Message]) -> str:
        conversation = [{"role": m.role, "content": self._defuse(m.content)} for m in messages]
        try:
            text: str = self._tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True
            )
        except (ValueError, TemplateError) as error:
            # many templates raise at a system message, as their models know none
            roles = ", ".join(m.role for m in messages)
            raise ConfigError(
                f"the tokenizer cannot render a chat of {roles}: {error}; take a model whose chat "
                "template has these roles, or a domain without them"
            ) from error
        return text

    def _defuse(self, content: str) -> str:
        """Break special tokens that are spelled out: error texts quote what the model wrote."""
        for token in self._special:
            if token in content:
                content = content.replace(token, f"{token[:1]} {token[1:]}")
        return content

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _decode_raw(self, token: int) -> str:
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text


def load_chat(folder: Path) -> ChatFormat:
    """Chat format of a model's folder.

    Raises:
        ConfigError: its tokenizer cannot be loaded, or its chat template does not serve.
    """
    from transformers import AutoTokenizer  # seconds

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        # the last three of JSON that holds something else than a tokenizer
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ConfigError(f"{folder}: its tokenizer cannot be loaded: {reason}") from error
    return ChatFormat(tokenizer)
