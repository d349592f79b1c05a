"""The body of a request for a response (`/v1/responses`), strictly.

Every field that is served stands in `ResponsesBody`; anything else is refused by its name, as in `pdq.api.body`. What
is submitted is the chat that it amounts to (`pdq.api.responses_chat`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pdq.api.chat import MOST_TOOLS, CallId, Name, Strict
from pdq.api.reading import decode_object, explained, unknown_field
from pdq.api.refusals import refuse

LOGPROBS = "message.output_text.logprobs"


class InputText(Strict, frozen=True, kw_only=True, tag_field="type", tag="input_text"):
    text: str


class AnswerText(Strict, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """As an earlier response had it; only its text counts."""

    text: str
    annotations: tuple[Any, ...] = ()
    logprobs: tuple[Any, ...] = ()


Part = InputText | AnswerText


class _Item(Strict, frozen=True, kw_only=True, tag_field="type"):
    """`id` and `status` are those that an earlier response gave it; nothing depends on them."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class InputMessage(_Item, frozen=True, kw_only=True, tag="message"):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    phase: Literal["commentary", "final_answer"] | None = None


class InputCall(_Item, frozen=True, kw_only=True, tag="function_call"):
    call_id: CallId
    name: Name
    arguments: str


class InputCallOutput(_Item, frozen=True, kw_only=True, tag="function_call_output"):
    call_id: CallId
    output: str | list[Part]


class InputReasoningText(Strict, frozen=True, kw_only=True):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(_Item, frozen=True, kw_only=True, tag="reasoning"):
    summary: tuple[InputReasoningText, ...] = ()
    content: tuple[InputReasoningText, ...] = ()


Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
InputItem = InputMessage | InputCall | InputCallOutput | InputReasoning


class FunctionTool(Strict, frozen=True, kw_only=True):
    type: Literal["function"]
    name: Name
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Strict, frozen=True, kw_only=True):
    type: Literal["function"]
    name: Name


class TextFormat(Strict, frozen=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema: dict[str, Any] | None = None
    description: str = ""
    strict: bool | None = None


class TextConfig(Strict, frozen=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Nothing(Strict, frozen=True, kw_only=True):
    """An object whose fields are none of them served (`NOT_SERVED`)."""


class ResponsesBody(Strict, frozen=True, kw_only=True):
    """What is accepted for the sake of OpenAI's clients, and changes no answer: `user`, `safety_identifier`,
    `prompt_cache_key`, `service_tier`, `metadata`."""

    model: str | None = None
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    text: TextConfig | None = None
    tools: Annotated[tuple[FunctionTool, ...], Meta(max_length=MOST_TOOLS)] = ()
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice = "auto"
    parallel_tool_calls: bool = True
    include: tuple[Literal["message.output_text.logprobs"], ...] = ()
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream: bool = False
    background: bool = False
    """It goes on when its client leaves; unless it is streamed, its client is answered at once."""
    store: bool = True
    """False: it is removed when it has been answered."""
    truncation: Literal["disabled"] = "disabled"
    metadata: Metadata | None = None
    reasoning: Nothing | None = None
    stream_options: Nothing | None = None
    service_tier: Literal["auto", "default"] = "auto"
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def check(self) -> None:
        """Raise Rejected where fields do not fit together."""
        if self.top_logprobs is not None and not self.include:
            message = f"top_logprobs is {self.top_logprobs}; it needs include: ['{LOGPROBS}']"
            raise refuse("invalid_value", "top_logprobs", message)
        if self.background and not self.store:
            message = "store is false, and background true: what is not kept cannot be asked for later"
            raise refuse("invalid_value", "store", message)


NOT_SERVED = {
    **dict.fromkeys(
        "access_programs background_options context_management conversation image max_tool_calls moderation prompt "
        "prompt_cache_options prompt_cache_retention".split(),
        "is not served",
    ),
    "previous_response_id": "is not served: answers are kept, prompts are not; send the conversation as input",
    "reasoning.effort": "is not served: a model reasons as its chat template has it",
    "reasoning.summary": "is not served: a model's reasoning comes in full",
    "reasoning.generate_summary": "is not served: a model's reasoning comes in full",
    "stream_options.include_obfuscation": "is not served",
}
"""By place, with what is told of it. Within an object only what asks for something is refused."""


def parse_responses_body(raw: bytes) -> ResponsesBody:
    """A body, checked as far as it can be without a model, but for what the checks of chats find in `translate`'s.

    Raises Rejected, and nothing else.
    """
    fields = _tidied(decode_object(raw))
    try:
        body = msgspec.convert(fields, ResponsesBody)
    except msgspec.ValidationError as exc:
        # Not chained: msgspec's message holds the value in full.
        raise explained(fields, str(exc)) from None
    body.check()
    return body


def _tidied(document: dict[str, Any]) -> dict[str, Any]:
    """Without fields that are null, which count as absent, and with the type of each item of the input."""
    _refuse_unserved(document)
    fields: dict[str, Any] = _present(document)
    if isinstance(fields.get("input"), list):
        fields["input"] = [_tidied_item(item) for item in fields["input"]]
    if isinstance(fields.get("tools"), list):
        fields["tools"] = [_present(tool) for tool in fields["tools"]]
    if isinstance(fields.get("text"), dict):
        fields["text"] = {name: _present(value) for name, value in _present(fields["text"]).items()}
    for name in ("reasoning", "stream_options"):
        if isinstance(fields.get(name), dict):
            fields[name] = {key: value for key, value in fields[name].items() if f"{name}.{key}" not in NOT_SERVED}
    return fields


def _refuse_unserved(document: dict[str, Any]) -> None:
    for name, value in document.items():
        if name not in ResponsesBody.__struct_fields__ and name not in NOT_SERVED:
            raise unknown_field("", name)
        asked = {name: value} if name in NOT_SERVED else {}
        if name in ("reasoning", "stream_options") and isinstance(value, dict):
            asked = {f"{name}.{key}": each for key, each in value.items() if each is not False}
        for place, each in asked.items():
            if each is not None and place in NOT_SERVED:
                raise refuse("unsupported", place, f"{place} {NOT_SERVED[place]}")


def _present(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: each for name, each in value.items() if each is not None}


def _tidied_item(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    fields = {"type": "message"} | _present(item)
    return {name: list(map(_present, each)) if isinstance(each, list) else each for name, each in fields.items()}
