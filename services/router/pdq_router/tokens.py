"""Text to token ids with a model's own tokenizer and chat template; no weights, no torch.

Control tokens. What stands in a message or a tool is text: `<|im_end|>` typed by a user is tokenised as the characters
it is, and cannot end a turn or open one in another role; nor can a template put one together of its own characters and
theirs (`<` and a parameter named `|im_end|`). A `prompt` (completions) is the caller's whole, like an
array of ids: control tokens in it count, so that people can render a template themselves.

Cost: 0.5 to 1.6 ms per kB of text (SmolLM2, one core), linear; the GIL is released. Callers on an event loop
give bodies beyond `INLINE_BYTES` to a thread.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pdq.api.refusals import refuse
from pdq.bytes_tokenizer import BytesTokenizer
from pdq.errors import Misconfigured
from pdq.settings import ModelSpec

from pdq_router.controls import Guard

INLINE_BYTES = 4_096
"""Bodies up to this size take a few milliseconds: less than a thread would save."""

ChatMessages = Sequence[Mapping[str, Any]]
"""Turns with `role` and `content`, and what else they have (`pdq.api.chat.Message.turn`); checked before."""
Tools = Sequence[Mapping[str, Any]]
"""Tools as templates take them (`pdq.api.chat.Tool.shown`)."""


class Tokenizer(Protocol):
    """Both are synchronous, and safe in several threads at once."""

    def encode(self, text: str) -> list[int]:
        """Ids of a whole prompt, with what the tokenizer puts around every text (a begin token)."""

    def encode_chat(self, messages: ChatMessages, tools: Tools = ()) -> list[int]:
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

    def encode_chat(self, messages: ChatMessages, tools: Tools = ()) -> list[int]:
        shown = [{"role": "tools", "content": json.dumps(tools, ensure_ascii=False)}] if tools else []
        return self._tokenizer.encode(self._tokenizer.chat([*shown, *map(_with_calls, messages)]))


def _with_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = [f"<tool_call>{json.dumps(call['function'], ensure_ascii=False)}</tool_call>" for call in _calls(message)]
    return {**message, "content": "".join([message["content"], *calls])}


def _calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = message.get("tool_calls", [])
    return calls


class HfTokenizer:
    """`tokenizer.json` and the chat template of a Hugging Face model.

    `tokenizer` is a `tokenizers.Tokenizer`; `render` fills the chat template, and is None where there is none.
    """

    def __init__(self, tokenizer: Any, render: Render | None) -> None:
        self._with_controls = _whole(tokenizer)
        self._as_text = _whole(tokenizer)
        self._as_text.encode_special_tokens = True
        self._render = render
        self._literals = _literals(tokenizer)
        self._guard = Guard(self._literals)

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

    def encode_chat(self, messages: ChatMessages, tools: Tools = ()) -> list[int]:
        if self._render is None:
            raise refuse("unsupported", "messages", "messages cannot be used: the model has no chat template")
        rendered = self._render(
            [self._marked(message) for message in messages], [self._guard.mark_all(tool) for tool in tools]
        )
        ids: list[int] = []
        for text, literal in self._guard.split(rendered):
            ids += (self._as_text if literal else self._with_controls).encode(text, add_special_tokens=False).ids
        return ids

    def _marked(self, message: Mapping[str, Any]) -> dict[str, Any]:
        texts = {name: self._guard.mark(value) for name, value in message.items() if isinstance(value, str)}
        return {
            **message,
            **texts,
            **({"tool_calls": self._guard.mark_all(calls)} if (calls := _calls(message)) else {}),
        }


def _literals(tokenizer: Any) -> list[str]:
    """Strings that a message may hold as text only."""
    added = tokenizer.get_added_tokens_decoder().values()
    return sorted(token.content for token in added if token.special and token.content)


def _whole(tokenizer: Any) -> Any:
    """A copy that neither cuts nor pads, whatever tokenizer.json says."""
    own = copy.deepcopy(tokenizer)
    own.no_truncation()
    own.no_padding()
    return own


Render = Callable[[ChatMessages, Tools], str]


def _template(loaded: Any) -> Render:
    from jinja2.exceptions import TemplateError

    uses_tools = "tools" in _variables(loaded)

    def render(messages: ChatMessages, tools: Tools) -> str:
        if tools and not uses_tools:
            raise refuse(
                "unsupported", "tools", "tools cannot be used: the model's chat template has no place for them"
            )
        try:
            text: str = loaded.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as exc:
            # Not chained, and cut: a template may quote what it was given. What its Python side raises is not its own.
            verdict = " ".join(str(exc).split())[:80] if isinstance(exc, TemplateError) else type(exc).__name__
            raise refuse("invalid_value", "messages", f"messages do not fit the chat template: {verdict}") from None
        return text

    return render


def _variables(loaded: Any) -> set[str]:
    """What the model's chat templates look for."""
    from jinja2 import Environment, meta

    template = loaded.chat_template
    texts = template.values() if isinstance(template, dict) else [template]
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    for tag in ("generation", "endgeneration"):
        texts = [re.sub(rf"{{%-?\s*{tag}\s*-?%}}", "", text) for text in texts]
    return set().union(*(meta.find_undeclared_variables(environment.parse(text)) for text in texts))


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Every id lies in 0..vocab_size-1. Raises Rejected, naming the first that does not."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    index = next(index for index, token in enumerate(ids) if not 0 <= token < vocab_size)
    bad = str(ids[index])[:40]
    message = f"{param}[{index}] is {bad}; expected a token id from 0 to {vocab_size - 1}"
    raise refuse("token_out_of_range", f"{param}[{index}]", message)
