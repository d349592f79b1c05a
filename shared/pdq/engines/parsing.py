"""Answers taken apart by vLLM's parsers: reasoning, content and tool calls, and the grammars that forced calls need.

A parser is fed one token at a time, whatever the engine's batches were, so what it gives follows from the tokens alone:
another attempt, or another worker, that feeds the same tokens gets the same deltas. Names of calls come from the
request, not at random. A parser that fails on what a model wrote is left, and the rest of the answer is content.

vLLM is imported when the parsers are made, not before: it takes seconds.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from pdq.engines.base import Work
from pdq.errors import Misconfigured, Rejected, Unavailable
from pdq.messages import CallDelta, Delta, FinishReason, Tools
from pdq.settings import ModelSpec

log = logging.getLogger("pdq.engine")

ID_CHARS = 24
MISTRAL_ID_CHARS = 9
"""What Mistral's chat templates accept, and its parser makes."""


class Parsers:
    """The parsers that models.toml names for a model. Raises Misconfigured where they are none of vLLM's, or do not fit
    the model's tokenizer. `tokenizer` and `model_config` are vLLM's."""

    def __init__(self, spec: ModelSpec, tokenizer: Any, model_config: Any = None) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self._model_config = model_config
        self._parser = self._composed() if spec.tool_parser or spec.reasoning_parser else None

    def reading(self, work: Work) -> Reading:
        """How one parsed answer is read. Raises Rejected for tools that no grammar can be made of, and Unavailable
        where this worker's models.toml names no parsers."""
        if self._parser is None:
            raise Unavailable(
                f"model {self._spec.slug!r} has no parsers in this worker's models.toml; its router's has"
            )
        parser = self._parser(self._tokenizer, _tools(work), chat_template_kwargs={}, model_config=self._model_config)
        return Reading(parser, self._tokenizer, work)

    def _composed(self) -> Any:
        from vllm.parser import ParserManager

        named = {name: getattr(self._spec, name) for name in ("tool_parser", "reasoning_parser")}
        try:
            return ParserManager.get_parser(
                tool_parser_name=self._spec.tool_parser or None,
                reasoning_parser_name=self._spec.reasoning_parser or None,
                enable_auto_tools=True,
                model_name=self._spec.id,
                tokenizer=self._tokenizer,
            )
        except Exception as exc:  # whatever a parser finds wrong with a tokenizer
            told = ", ".join(f"{name} {value!r}" for name, value in named.items() if value)
            raise Misconfigured(f"model {self._spec.slug!r}: {told} cannot be used: {exc.__cause__ or exc}") from exc


class Reading:
    """One answer, as it comes: give it vLLM's outputs, it gives deltas. It counts from the answer's start: the first
    delta has what `Work.shown` adds."""

    def __init__(self, parser: Any, tokenizer: Any, work: Work) -> None:
        self._parser = parser
        self._work = work
        self._parser_request = _adjusted(parser, work)
        self.skip_special_tokens: bool = self._parser_request.skip_special_tokens
        """What vLLM's own detokenizer must be told too, or its text is another."""
        self._prompt = list(work.prompt)
        self._pieces = Pieces(tokenizer, self._prompt, self.skip_special_tokens)
        self._calls = Calls(work)
        self._waiting: deque[tuple[int, str]] = deque()
        self._room = 0
        self._left = False
        self._before = Delta()

    def guide(self) -> Any:
        """vLLM's StructuredOutputsParams of the answer; None: the text is free."""
        from vllm.sampling_params import StructuredOutputsParams

        sampling = self._work.sampling
        if sampling.tools is not None and sampling.tools.guided:
            return self._parser_request.extract_structured_outputs()
        return StructuredOutputsParams(json=sampling.guide) if sampling.guide else None

    @property
    def reasoning_ended(self) -> bool | None:
        """Whether a grammar counts from the first token on; None: the engine looks for the end of reasoning itself."""
        return self._parser_request.resolve_reasoning_ended(self._parser, self._prompt)  # type: ignore[no-any-return]

    def resume(self, ended: FinishReason | None) -> None:
        """Read what was shown before; `ended`: how the answer ended, if that is all of it. Time is that of parsing it
        all again: for long answers, call it in a thread."""
        self._before = _joined(self._read(self._work.shown, ended is not None, ended == "stop", free=True))

    def take(self, completion: Any) -> Delta:
        """What one of vLLM's outputs adds (its `outputs[0]`)."""
        ended = completion.finish_reason is not None
        by_token = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
        self._room += len(completion.text)
        free = not self._work.sampling.stop
        before, self._before = self._before, Delta()
        return _joined((before, *self._read(completion.token_ids, ended, by_token, free)))

    def reason(self, reason: FinishReason) -> FinishReason:
        """How the answer ended, once all of it is read: `tool_calls` where it ended by itself after whole calls."""
        return "tool_calls" if reason == "stop" and self._calls.whole else reason

    def _read(self, ids: Sequence[int], ended: bool, by_token: bool, free: bool) -> Iterator[Delta]:
        """Feed the parser. A text that may become a stop string is held back until vLLM shows it, and cut as vLLM
        cuts it; with `free` there is none."""
        last = len(ids) - 1
        for place, token in enumerate(ids):
            self._waiting.append((token, "" if by_token and place == last else self._pieces.next(token)))
        while self._waiting and (ended or free or len(self._waiting[0][1]) <= self._room):
            token, piece = self._waiting.popleft()
            piece = piece if free else piece[: self._room]
            self._room -= 0 if free else len(piece)
            yield self._fed([token], piece, finished=by_token and not self._waiting)
        if ended and not by_token:
            # By itself: with a token of a call, vLLM takes a call that was cut off for one without arguments.
            yield self._fed([], "", finished=True)

    def _fed(self, ids: list[int], piece: str, finished: bool) -> Delta:
        if self._left:
            return Delta(content=piece)
        try:
            message = self._parser.parse_delta(
                piece, ids, self._parser_request, prompt_token_ids=self._prompt, finished=finished
            )
        except Exception as exc:
            # Its text would quote the answer.
            log.warning(
                "a parser failed, what is left of the answer is content: %s",
                type(exc).__name__,
                extra={"request_id": self._work.request},
            )
            self._left = True
            return Delta(content=piece)
        return self._calls.delta(message) if message is not None else Delta()


class Pieces:
    """The text of tokens one by one, as vLLM's detokenizer has it: a character comes with the token that completes it.

    `tokenizer` is a fast one, as all with a tokenizer.json are.
    """

    def __init__(self, tokenizer: Any, prompt: list[int], skip_special_tokens: bool) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer._tokenizer
        self._new: Any = partial(DecodeStream, skip_special_tokens=skip_special_tokens)
        self._stream = self._new(ids=prompt)

    def next(self, token: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception as exc:  # the Rust side raises Exception itself
            if not str(exc).startswith("Invalid prefix"):
                raise
            # Bytes that are no text can confuse it; vLLM begins anew there too.
            self._stream = self._new()
            return self._stream.step(self._tokenizer, token) or ""


class Calls:
    """The tool calls of one answer: numbered from 0 without gaps, named after the request, each begun by its name."""

    def __init__(self, work: Work) -> None:
        tools = work.sampling.tools
        # An attempt is part of a work's name, and must not be part of a call's.
        self._request = work.request.rsplit(".d", 1)[0]
        self._most = 1 if tools is not None and not tools.parallel else None
        self._places: dict[int, int] = {}
        self._arguments: list[str] = []
        self._early: dict[int, str] = {}

    @property
    def whole(self) -> bool:
        """There is a call, and the arguments of each are a JSON object."""
        return bool(self._arguments) and all(map(_is_object, self._arguments))

    def delta(self, message: Any) -> Delta:
        """A DeltaMessage of vLLM's as ours."""
        pieces = (self._piece(call) for call in message.tool_calls)
        calls = tuple(piece for piece in pieces if piece is not None)
        return Delta(content=message.content or "", reasoning=message.reasoning or "", tool_calls=calls)

    def _piece(self, call: Any) -> CallDelta | None:
        function = call.function
        name, arguments = (function.name or "", function.arguments or "") if function is not None else ("", "")
        if call.index in self._places:
            index = self._places[call.index]
            self._arguments[index] += arguments
            return CallDelta(index=index, arguments=arguments) if arguments else None
        arguments = self._early.pop(call.index, "") + arguments
        if not name:
            self._early[call.index] = arguments
            return None
        if len(self._arguments) == self._most:
            return None
        index = self._places[call.index] = len(self._arguments)
        self._arguments.append(arguments)
        return CallDelta(index=index, id=self._id(index, call.id or ""), name=name, arguments=arguments)

    def _id(self, index: int, given: str) -> str:
        """Fixed, where vLLM's is random. One that says something (Kimi's `functions.<name>:<number>`) stays."""
        if given.startswith("functions."):
            return given
        digest = hashlib.sha256(f"{self._request}:{index}".encode()).hexdigest()
        return digest[:MISTRAL_ID_CHARS] if len(given) == MISTRAL_ID_CHARS else f"call_{digest[:ID_CHARS]}"


def _joined(deltas: Iterable[Delta]) -> Delta:
    content, reasoning, calls = "", "", list[CallDelta]()
    for delta in deltas:
        content += delta.content
        reasoning += delta.reasoning
        calls += delta.tool_calls
    return Delta(content=content, reasoning=reasoning, tool_calls=tuple(calls))


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _tools(work: Work) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam

    tools = work.sampling.tools
    return [ChatCompletionToolsParam(**tool) for tool in json.loads(tools.functions)] if tools is not None else None


def _adjusted(parser: Any, work: Work) -> Any:
    """vLLM's request as its parsers want it: they say in it what they need of the sampling.

    Forced and strict calls are held to the functions' schemas; a parser's own wish to hold free ones to a form is not
    heeded, because a second attempt goes on from where the first one was, which a grammar cannot.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.exceptions import VLLMClientError
    from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

    fields: dict[str, Any] = {"messages": []}
    tools = work.sampling.tools
    if tools is not None:
        fields |= {"tools": json.loads(tools.functions), "tool_choice": _choice(tools)}
        fields["parallel_tool_calls"] = tools.parallel
        if tools.guided:
            parser.tool_strict_level = ToolStrictLevel.PARAMETER
    if work.sampling.guide:
        schema = {"name": "answer", "schema": json.loads(work.sampling.guide)}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    try:
        return parser.adjust_request(ChatCompletionRequest(**fields))
    except (VLLMClientError, ValueError, RuntimeError) as exc:
        verdict = " ".join(str(exc).split())[:80]
        raise Rejected(f"tools cannot be held to their schemas: {verdict}", param="tools") from exc


def _choice(tools: Tools) -> Any:
    return {"type": "function", "function": {"name": tools.name}} if tools.choice == "named" else tools.choice
