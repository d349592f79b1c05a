"""Answers taken apart by vLLM's parsers: reasoning, content and tool calls, and the grammars that forced calls need.

A parser is fed one token at a time, whatever the engine's batches were, so what it gives follows from the tokens alone:
another attempt, or another worker, that feeds the same tokens gets the same deltas. Names of calls come from the
request, not at random. A parser that fails on what a model wrote is left, and the rest of the answer is content.

vLLM is imported when the parsers are made, not before: it takes seconds.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from pdq.engines.base import Work
from pdq.engines.calls import Calls, joined
from pdq.engines.grammar import enforceable, enforceable_tools
from pdq.errors import Misconfigured, Rejected, Unavailable
from pdq.messages import CallDelta, Delta, FinishReason, Tools
from pdq.settings import ModelSpec

log = logging.getLogger("pdq.engine")


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
        return StructuredOutputsParams(json=enforceable(sampling.guide)) if sampling.guide else None

    @property
    def reasoning_ended(self) -> bool | None:
        """Whether a grammar counts from the first token on; None: the engine looks for the end of reasoning itself."""
        return self._parser_request.resolve_reasoning_ended(self._parser, self._prompt)  # type: ignore[no-any-return]

    def resume(self, ended: FinishReason | None) -> None:
        """Read what was shown before; `ended`: how the answer ended, if that is all of it. Time is that of parsing it
        all again: for long answers, call it in a thread."""
        self._before = joined(self._read(self._work.shown, ended is not None, ended == "stop", free=True))

    def take(self, completion: Any) -> Delta:
        """What one of vLLM's outputs adds (its `outputs[0]`)."""
        ended = completion.finish_reason is not None
        by_token = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
        self._room += len(completion.text)
        free = not self._work.sampling.stop
        before, self._before = self._before, Delta()
        return joined((before, *self._read(completion.token_ids, ended, by_token, free)))

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
        return self._delta(message) if message is not None else Delta()

    def _delta(self, message: Any) -> Delta:
        """A DeltaMessage of vLLM's as ours."""
        calls = (self._call(call) for call in message.tool_calls)
        return Delta(
            content=message.content or "",
            reasoning=message.reasoning or "",
            tool_calls=tuple(call for call in calls if call is not None),
        )

    def _call(self, call: Any) -> CallDelta | None:
        function = call.function
        name, arguments = (function.name or "", function.arguments or "") if function is not None else ("", "")
        return self._calls.piece(call.index, name, arguments, call.id or "")


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
        functions = enforceable_tools(tools.functions) if tools.guided else json.loads(tools.functions)
        fields |= {"tools": functions, "tool_choice": _choice(tools)}
        fields["parallel_tool_calls"] = tools.parallel
        if tools.guided:
            parser.tool_strict_level = ToolStrictLevel.PARAMETER
    if work.sampling.guide:
        schema = {"name": "answer", "schema": json.loads(enforceable(work.sampling.guide))}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    try:
        return parser.adjust_request(ChatCompletionRequest(**fields))
    except (VLLMClientError, ValueError, RuntimeError) as exc:
        verdict = " ".join(str(exc).split())[:80]
        raise Rejected(f"tools cannot be held to their schemas: {verdict}", param="tools") from exc


def _choice(tools: Tools) -> Any:
    return {"type": "function", "function": {"name": tools.name}} if tools.choice == "named" else tools.choice
