"""What a chat is made of: its messages, the tools that its answer may call, and which it must."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pdq.api.refusals import refuse, shown
from pdq.api.schema import check_schema
from pdq.messages import Tools

MOST_TOOLS = 128
LARGEST_TOOLS_BYTES = 131_072
"""A job carries them, beside its prompt, and may not be larger than a message."""

Name = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-]{1,64}\Z")]
CallId = Annotated[str, Meta(min_length=1, max_length=128)]

NULLS = frozenset("content name tool_calls refusal audio function_call annotations reasoning reasoning_content".split())
"""Fields of an assistant's message that OpenAI's clients send back as null: those count as absent."""


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A field without a place here is an error."""


class TextPart(Strict, frozen=True, kw_only=True):
    type: Literal["text"]
    text: str


class CalledFunction(Strict, frozen=True, kw_only=True):
    name: Name
    arguments: str
    """JSON text, as the model wrote it."""

    def values(self) -> Any:
        """The arguments as templates want them: an object, if they are one; else their text."""
        try:
            values = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            return self.arguments
        return values if isinstance(values, dict) else self.arguments


class ToolCall(Strict, frozen=True, kw_only=True):
    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict, frozen=True, kw_only=True):
    """One turn. Roles are those that chat templates in general know; a `developer` is one's `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | UnsetType = UNSET
    """Only an assistant's message that calls tools may lack it."""
    name: Name | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: CallId | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """An older name for the same."""

    @property
    def text(self) -> str:
        """The content as one string; parts are joined by line ends, as vLLM's own server does."""
        if isinstance(self.content, UnsetType):
            return ""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)

    def turn(self) -> dict[str, Any]:
        """As chat templates take it, with the fields that it has."""
        turn: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        for name in ("name", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                turn[name] = value
        if self.tool_calls:
            turn["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": name, "arguments": call.function.values()}}
                for call in self.tool_calls
                if (name := call.function.name)
            ]
        if reasoning := self.reasoning or self.reasoning_content:
            turn |= {"reasoning": reasoning, "reasoning_content": reasoning}
        return turn

    def check(self, place: str) -> None:
        """Raise Rejected for a field that its role must have, or cannot."""
        if isinstance(self.content, UnsetType) and not self.tool_calls:
            raise refuse("missing_field", f"{place}.content", f"{place} has no content; it is required")
        if (self.role == "tool") != (self.tool_call_id is not None):
            param = f"{place}.tool_call_id"
            if self.role == "tool":
                raise refuse("missing_field", param, f"{place} has no tool_call_id; its role 'tool' needs it")
            raise refuse("invalid_value", param, f"{param} is given; only the role 'tool' has it")
        for name in ("tool_calls", "reasoning", "reasoning_content"):
            if getattr(self, name) and self.role != "assistant":
                raise refuse("invalid_value", f"{place}.{name}", f"{place}.{name} is given; only an assistant has it")


class Function(Strict, frozen=True, kw_only=True):
    name: Name
    description: str = ""
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments; None: it has none."""
    strict: bool | None = None


class Tool(Strict, frozen=True, kw_only=True):
    type: Literal["function"]
    function: Function

    def shown(self) -> dict[str, Any]:
        """As chat templates take it."""
        function = {"name": self.function.name, "parameters": self.function.parameters or _NO_PARAMETERS}
        if self.function.description:
            function = {"name": self.function.name, "description": self.function.description, **function}
        return {"type": "function", "function": function}


_NO_PARAMETERS = {"type": "object", "properties": {}}


class NamedFunction(Strict, frozen=True, kw_only=True):
    name: Name


class NamedChoice(Strict, frozen=True, kw_only=True):
    type: Literal["function"]
    function: NamedFunction


Choice = Literal["none", "auto", "required"] | NamedChoice


def tool_use(tools: Sequence[Tool], choice: Choice | None, parallel: bool) -> Tools | None:
    """As `Sampling.tools`; None: the answer calls nothing. Raises Rejected, naming the place."""
    name = choice.function.name if isinstance(choice, NamedChoice) else ""
    if not tools:
        if name or choice == "required":
            raise refuse("invalid_value", "tool_choice", "tool_choice asks for a call, but there are no tools")
        return None
    names = _names(tools)
    if name and name not in names:
        message = f"tool_choice.function.name is {shown(name)}, which is none of the tools"
        raise refuse("invalid_value", "tool_choice.function.name", message)
    if choice == "none":
        return None
    functions = msgspec.json.encode(tools)
    if len(functions) > LARGEST_TOOLS_BYTES:
        message = f"tools have {len(functions)} bytes of JSON; expected at most {LARGEST_TOOLS_BYTES}"
        raise refuse("invalid_value", "tools", message)
    use = Tools(
        functions=functions.decode(),
        choice="named" if name else "required" if choice == "required" else "auto",
        name=name,
        parallel=parallel,
        strict=any(tool.function.strict for tool in tools),
    )
    if use.guided:
        for index, tool in enumerate(tools):
            check_schema(tool.function.parameters or {}, f"tools[{index}].function.parameters")
    return use


def _names(tools: Sequence[Tool]) -> set[str]:
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.function.name in names:
            param = f"tools[{index}].function.name"
            raise refuse("invalid_value", param, f"{param} is {shown(tool.function.name)}, as that of an earlier tool")
        names.add(tool.function.name)
    return names
