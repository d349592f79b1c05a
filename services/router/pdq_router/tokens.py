"""Text to token ids with a model's own tokenizer and chat template; no weights, no torch.

Control tokens. What stands in a message is text: `<|im_end|>` typed by a user is tokenised as the characters it
is, and cannot end a turn or open one in another role. A `prompt` (completions) is the caller's whole, like an
array of ids: control tokens in it count, so that people can render a template themselves.

Cost: 0.5 to 1.6 ms per kB of text (SmolLM2, one core), linear; the GIL is released. Callers on an event loop
give bodies beyond `INLINE_BYTES` to a thread.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pdq.api.refusals import refuse
from pdq.bytes_tokenizer import BytesTokenizer
from pdq.errors import Misconfigured
from pdq.settings import ModelSpec

INLINE_BYTES = 4_096
"""Bodies up to this size take a few milliseconds: less than a thread would save."""

ChatMessages = Sequence[Mapping[str, str]]
"""Turns with `role` and `content`, and `name` where given; checked before."""


class Tokenizer(Protocol):
    """Both are synchronous, and safe in several threads at once."""

    def encode(self, text: str) -> list[int]:
        """Ids of a whole prompt, with what the tokenizer puts around every text (a begin token)."""

    def encode_chat(self, messages: ChatMessages) -> list[int]:
        """Ids of a chat, ready for the assistant's turn. Raises Rejected when the template cannot render it."""


def load_tokenizer(spec: ModelSpec) -> Tokenizer:
    """The tokenizer of a model, from files on this machine. Raises Misconfigured, saying how to get them."""
    if spec.tokenizer == "bytes":
        return BytesChat(BytesTokenizer(spec.vocab_size, spec.eos_token_ids))
    return HfTokenizer.load(spec)


class BytesChat:
    """The sim's tokenizer: its ids are bytes, and it has no control tokens."""

    def __init__(self, tokenizer: BytesTokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def encode_chat(self, messages: ChatMessages) -> list[int]:
        return self._tokenizer.encode(self._tokenizer.chat(messages))


class HfTokenizer:
    """`tokenizer.json` and the chat template of a Hugging Face model.

    `tokenizer` is a `tokenizers.Tokenizer`; `render` fills the chat template, and is None where there is none.
    """

    def __init__(self, tokenizer: Any, render: Callable[[ChatMessages], str] | None) -> None:
        self._with_controls = _whole(tokenizer)
        self._as_text = _whole(tokenizer)
        self._as_text.encode_special_tokens = True
        self._render = render
        self._literals = _literals(tokenizer)
        self._numbers = {text: str(number) for number, text in enumerate(self._literals)}
        self._literal = re.compile(any_of(self._literals))

    @classmethod
    def load(cls, spec: ModelSpec) -> HfTokenizer:
        source = str(Path(spec.path).expanduser()) if spec.path else spec.id
        try:
            # Here, so that a router of sim models needs no transformers. AutoTokenizer would import torch.
            from transformers import PreTrainedTokenizerFast

            loaded = PreTrainedTokenizerFast.from_pretrained(source, local_files_only=True)
        except Exception as exc:  # the Rust side raises Exception itself
            cause = (str(exc).splitlines() or [type(exc).__name__])[0]
            raise Misconfigured(
                f"model {spec.slug!r}: no tokenizer in {source!r} ({cause}); set `path` in its "
                "models.toml table to a directory with tokenizer.json, or get one with `python -m pdq.model fetch`"
            ) from exc
        return cls(loaded.backend_tokenizer, _template(loaded) if loaded.chat_template else None)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._with_controls.encode(text).ids
        return ids

    def encode_chat(self, messages: ChatMessages) -> list[int]:
        if self._render is None:
            raise refuse("unsupported", "messages", "messages cannot be used: the model has no chat template")
        marked = [{**message, "content": self._literal.sub(self._mark, message["content"])} for message in messages]
        ids: list[int] = []
        for index, piece in enumerate(_MARKED.split(self._render(marked))):
            # Pieces alternate: the template with the text of messages, then the number of a literal.
            tokenizer, text = (self._as_text, self._literals[int(piece)]) if index % 2 else (self._with_controls, piece)
            ids += tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _mark(self, found: re.Match[str]) -> str:
        return f"{_MARK}{self._numbers[found[0]]}{_MARK}"


_MARK = "\ue000"
"""A private-use character. In a message it is a literal like any control token, so it cannot forge a mark."""
_MARKED = re.compile(f"{_MARK}([0-9]+){_MARK}")


def _literals(tokenizer: Any) -> list[str]:
    """Strings that a message may hold as text only."""
    added = tokenizer.get_added_tokens_decoder().values()
    return [_MARK, *sorted(token.content for token in added if token.special and token.content)]


def any_of(texts: Sequence[str]) -> str:
    """A regular expression for the longest of `texts` at a place. Common beginnings are shared: a model may have
    a thousand control tokens, and tried one by one they make a text of "<<<<" take seconds with the GIL held."""
    tails: dict[str, list[str]] = {}
    for text in texts:
        tails.setdefault(text[:1], []).append(text[1:])
    may_end = tails.pop("", None) is not None
    branches = [re.escape(head) + any_of(rest) for head, rest in tails.items()]
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)}){'?' * may_end}"


def _whole(tokenizer: Any) -> Any:
    """A copy that neither cuts nor pads, whatever tokenizer.json says."""
    own = copy.deepcopy(tokenizer)
    own.no_truncation()
    own.no_padding()
    return own


def _template(loaded: Any) -> Callable[[ChatMessages], str]:
    from jinja2 import TemplateError

    def render(messages: ChatMessages) -> str:
        try:
            text: str = loaded.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except TemplateError as exc:
            # Not chained, and cut: a template may quote what it was given.
            verdict = " ".join(str(exc).split())[:80]
            raise refuse("invalid_value", "messages", f"messages do not fit the chat template: {verdict}") from None
        return text

    return render


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Every id lies in 0..vocab_size-1. Raises Rejected, naming the first that does not."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    index = next(index for index, token in enumerate(ids) if not 0 <= token < vocab_size)
    bad = str(ids[index])[:40]
    message = f"{param}[{index}] is {bad}; expected a token id from 0 to {vocab_size - 1}"
    raise refuse("token_out_of_range", f"{param}[{index}]", message)
