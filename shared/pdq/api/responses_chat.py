"""The one place where a request for a response becomes a chat, and a chat's errors those of the request. Pure.

So the log, the router and the workers know no other kind of request, and a response is the answer to its chat.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from pdq.api.refusals import refuse
from pdq.api.responses_body import (
    FunctionChoice,
    FunctionTool,
    InputCall,
    InputCallOutput,
    InputItem,
    InputMessage,
    InputReasoning,
    Part,
    ResponsesBody,
    TextFormat,
)
from pdq.messages import ErrorInfo


class Chat(NamedTuple):
    body: bytes
    """Of a chat completion (`pdq.api.body.ChatBody`)."""
    places: tuple[str, ...]
    """Of each of its messages, where it comes from: `instructions`, `input`, `input[2]`."""


def translate(body: ResponsesBody) -> Chat:
    """The chat. Raises Rejected for a `text.format` that is odd; what else is wrong is found by the chat's checks."""
    turns = _turns(body)
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": [turn for _, turn in turns],
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "response_format": _response_format(body.text.format) if body.text and body.text.format else None,
        "stream": body.stream,
    }
    if body.tools or body.tool_choice != "auto":
        fields |= {"tools": list(map(_tool, body.tools)), "parallel_tool_calls": body.parallel_tool_calls}
        fields["tool_choice"] = _choice(body)
    if body.include:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    present = {name: value for name, value in fields.items() if value is not None}
    return Chat(msgspec.json.encode(present), tuple(place for place, _ in turns))


Turns = list[tuple[str, dict[str, Any]]]
"""Messages of a chat, each with its place."""


def _turns(body: ResponsesBody) -> Turns:
    turns: Turns = []
    if body.instructions:
        turns.append(("instructions", {"role": "system", "content": body.instructions}))
    if isinstance(body.input, str):
        return [*turns, ("input", {"role": "user", "content": body.input})]
    own: Turns = []
    for index, item in enumerate(body.input):
        _add(own, f"input[{index}]", item)
    return turns + own


def _add(turns: Turns, place: str, item: InputItem) -> None:
    """An assistant's reasoning, its message and its calls, where they follow one another, are one turn."""
    if isinstance(item, InputMessage) and item.role != "assistant":
        turns.append((place, {"role": item.role, "content": _content(item.content)}))
    elif isinstance(item, InputCallOutput):
        turns.append((place, {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}))
    else:
        turn = turns[-1][1] if turns else {}
        if turn.get("role") != "assistant" or not _goes_on(turn, item):
            turn = {"role": "assistant", "content": ""}
            turns.append((place, turn))
        _extend(turn, item)


def _goes_on(turn: dict[str, Any], item: InputItem) -> bool:
    """Whether an item belongs to an assistant's turn as it is by now."""
    if isinstance(item, InputCall):
        return True
    return isinstance(item, InputMessage) and not turn["content"] and "tool_calls" not in turn


def _extend(turn: dict[str, Any], item: InputItem) -> None:
    if isinstance(item, InputMessage):
        turn["content"] = _content(item.content)
    elif isinstance(item, InputReasoning):
        turn["reasoning"] = "\n".join(text.text for text in item.content or item.summary)
    elif isinstance(item, InputCall):
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        turn["tool_calls"] = [*turn.get("tool_calls", []), call]


def _content(content: str | list[Part]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]


def _tool(tool: FunctionTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function | {"strict": tool.strict}}


def _choice(body: ResponsesBody) -> Any:
    choice = body.tool_choice
    if isinstance(choice, FunctionChoice):
        return {"type": "function", "function": {"name": choice.name}}
    return choice


def _response_format(given: TextFormat) -> dict[str, Any]:
    for field, value in (("name", given.name), ("schema", given.schema)):
        place = f"text.format.{field}"
        if given.type == "json_schema" and value is None:
            raise refuse("missing_field", place, f"text.format has no {field}; its type 'json_schema' needs it")
        if given.type != "json_schema" and value is not None:
            raise refuse("invalid_value", place, f"{place} is given; it needs the type 'json_schema'")
    if given.type != "json_schema":
        return {"type": given.type}
    schema = {"name": given.name, "schema": given.schema, "description": given.description, "strict": given.strict}
    return {"type": given.type, "json_schema": schema}


_NAMES = (
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"(\btools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"\btool_choice\.function\b"), "tool_choice"),
    (re.compile(r"\bmax_(completion_)?tokens\b"), "max_output_tokens"),
)
_MESSAGE = re.compile(r"\bmessages\b(?:\[(\d+)\][.\w\[\]]*)?")


def renamed(error: ErrorInfo, places: tuple[str, ...] = ()) -> ErrorInfo:
    """An error of the chat, in the request's words. `places`: the chat's, where they are known."""
    param = _renamed(error.param, places) if error.param else error.param
    return msgspec.structs.replace(error, message=_renamed(error.message, places), param=param)


def _renamed(text: str, places: tuple[str, ...]) -> str:
    for chats, own in _NAMES:
        text = chats.sub(own, text)
    return _MESSAGE.sub(lambda found: _place(found[1], places), text)


def _place(index: str | None, places: tuple[str, ...]) -> str:
    return places[int(index)] if index and int(index) < len(places) else "input"
