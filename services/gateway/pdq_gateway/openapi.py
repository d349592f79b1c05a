"""The OpenAPI document: what the routes take and give, from the very structs that they read and write.

Written here, as Litestar's own generator sees neither bodies that are read as bytes, so that their refusals are ours,
nor answers that are streams.
"""

from __future__ import annotations

from typing import Any

import msgspec
from pdq import __version__
from pdq.api import answers, responses
from pdq.api.body import ChatBody, CompletionBody
from pdq.api.responses_body import ResponsesBody

from pdq_gateway.naming import MOST_CHOICES
from pdq_gateway.shapes import CHAT, COMPLETION, Shape

STRUCTS: tuple[Any, ...] = (
    ChatBody,
    CompletionBody,
    answers.ChatCompletion,
    answers.ChatChunk,
    answers.Completion,
    answers.Unfinished,
    answers.Deleted,
    ResponsesBody,
    responses.Response,
    responses.ResponseDeleted,
    *responses.EVENTS,
    answers.ModelCard,
    answers.ModelList,
    answers.ErrorAnswer,
)

Json = dict[str, Any]


def document() -> Json:
    """OpenAPI 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "pdq", "version": __version__, "description": "OpenAI's API over pdq's queues."},
        "paths": {
            "/v1/chat/completions": {"post": _create("createChatCompletion", CHAT, "ChatCompletion", "ChatChunk")},
            "/v1/chat/completions/{id}": {
                "get": _get("getChatCompletion", CHAT, "ChatCompletion", "ChatChunk"),
                "delete": _delete("deleteChatCompletion", f"{CHAT.prefix}-", "Deleted", _PURGE),
            },
            "/v1/completions": {"post": _create("createCompletion", COMPLETION, "Completion", "Completion")},
            "/v1/completions/{id}": {
                "get": _get("getCompletion", COMPLETION, "Completion", "Completion"),
                "delete": _delete("deleteCompletion", f"{COMPLETION.prefix}-", "Deleted", _PURGE),
            },
            **_responses(),
            "/v1/models": {
                "get": _operation("listModels", {"200": _json("ModelList", "The models served."), **_errors(401)})
            },
            "/v1/models/{id}": {
                "get": _operation(
                    "getModel",
                    {"200": _json("ModelCard", "A model."), **_errors(401, 404)},
                    parameters=[_parameter("path", "id", {"type": "string"}, "Its public id, or its slug.")],
                )
            },
            "/openapi.json": {"get": _operation("getOpenapi", {"200": _any("This document.")})},
        },
        "components": {
            "schemas": schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "An API key of a tenant."}},
        },
        # On loopback, before the first tenant was added, nobody needs one.
        "security": [{"key": []}, {}],
    }


def schemas() -> Json:
    """JSON schemas of all structs, by name."""
    _, found = msgspec.json.schema_components(STRUCTS, ref_template="#/components/schemas/{name}")
    for body in (ChatBody, CompletionBody):
        schema = found[body.__name__]
        # Over NATS the subject names the model, and there is one answer.
        schema["required"] = ["model", *schema["required"]]
        schema["properties"]["model"] = {"type": "string"}
        schema["properties"]["n"] |= {"minimum": 1, "maximum": MOST_CHOICES}
    found["ResponsesBody"]["required"] = ["model", "input"]
    found["ResponsesBody"]["properties"]["model"] = {"type": "string"}
    plain: Json = _ecma(found)
    return plain


def _ecma(schema: Any) -> Any:
    """Patterns are Python's; JSON schema has JavaScript's."""
    if isinstance(schema, list):
        return [_ecma(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _ecma(value) for name, value in schema.items()}
    if isinstance(found.get("pattern"), str):
        found["pattern"] = found["pattern"].replace(r"\A", "^").replace(r"\Z", "$")
    return found


def _create(name: str, shape: Shape, whole: str, chunk: str) -> Json:
    return _post(name, shape.body.__name__, _answer(whole, chunk))


def _post(name: str, body: str, answer: Json) -> Json:
    schema = {"$ref": f"#/components/schemas/{body}"}
    return _operation(
        name,
        {"200": answer, **_errors(400, 401, 404, 408, 409, 413, 415, 429, 431, 499, 500, 503, 504)},
        parameters=[
            _header("Idempotency-Key", _text(255), "The same key is the same request, which runs once."),
            _header("Last-Event-ID", _text(200), "Resume the stream of an Idempotency-Key after this event."),
            _header("Pdq-Background", {"enum": ["true", "false"]}, "Go on when the client leaves."),
            _header("Pdq-Deadline", {"type": "number", "exclusiveMinimum": 0}, "Seconds until the request expires."),
            _header("Pdq-Priority", {"enum": ["high", "normal", "low"]}, "Which queue it waits in."),
            _header(
                "Pdq-Order",
                {"enum": ["auto", "prefill-first", "decode-first", "decode-only"]},
                "Which way it goes through the workers.",
            ),
            *_common_headers(),
        ],
        requestBody={"required": True, "content": {"application/json": {"schema": schema}}},
    )


def _get(name: str, shape: Shape, whole: str, chunk: str) -> Json:
    return _operation(
        name,
        {
            "200": _answer(whole, chunk),
            "202": _json("Unfinished", "It has not ended yet."),
            **_errors(400, 401, 404, 499, 500, 503, 504),
        },
        parameters=[
            _id(f"{shape.prefix}-"),
            _parameter("query", "stream", {"type": "boolean"}, "Follow it, from its first token on."),
            _parameter("query", "include_usage", {"type": "boolean"}, "End its stream with the tokens used."),
            _header("Last-Event-ID", _text(200), "Follow it after this event."),
            *_common_headers(),
        ],
    )


def _responses() -> Json:
    """The paths of `/v1/responses`."""
    events = "Events whose `data` is an event of the response, and whose `id` is its `sequence_number`."
    streamed = _json("Response", "The response; or, as a stream, its events as server-sent events.")
    streamed["content"]["text/event-stream"] = {"schema": _event(events)}
    read = _operation(
        "getResponse",
        {"200": streamed, **_errors(400, 401, 404, 499, 500, 503, 504)},
        parameters=[
            _id("resp_"),
            _parameter("query", "stream", {"type": "boolean"}, "Follow it, from its first event on."),
            _parameter("query", "starting_after", {"type": "integer", "minimum": 0}, "Follow it after this event."),
            _parameter("query", "include_obfuscation", {"enum": [False]}, "Not served."),
            _header("Last-Event-ID", _text(200), "As `starting_after`, before which it goes."),
            *_common_headers(),
        ],
    )
    cancelled = {"200": _json("Response", "As it is now; one that had ended is as it was."), **_errors(401, 404, 503)}
    return {
        "/v1/responses": {"post": _post("createResponse", "ResponsesBody", streamed)},
        "/v1/responses/{id}": {"get": read, "delete": _delete("deleteResponse", "resp_", "ResponseDeleted")},
        "/v1/responses/{id}/cancel": {"post": _operation("cancelResponse", cancelled, parameters=[_id("resp_")])},
    }


def _delete(name: str, prefix: str, deleted: str, *parameters: Json) -> Json:
    answers = {"200": _json(deleted, "It is removed, and was ended if it ran."), **_errors(400, 401, 404, 503)}
    return _operation(name, answers, parameters=[_id(prefix), *parameters])


def _operation(name: str, responses: Json, **more: Any) -> Json:
    return {"operationId": name, "responses": responses, **more}


def _answer(whole: str, chunk: str) -> Json:
    found = _json(whole, "The answer; or, as a stream, its chunks as server-sent events, then `[DONE]`.")
    described = _event(f"Events whose `data` is a {chunk}, an ErrorAnswer or `[DONE]`.")
    found["content"]["text/event-stream"] = {"schema": described}
    return found


def _event(description: str) -> Json:
    """Of each server-sent event."""
    fields = {name: {"type": "string"} for name in ("data", "event", "id")}
    return {"type": "object", "properties": fields, "required": ["data"], "description": description}


def _json(struct: str, description: str) -> Json:
    schema = {"$ref": f"#/components/schemas/{struct}"}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _any(description: str) -> Json:
    return {"description": description, "content": {"application/json": {"schema": {"type": "object"}}}}


def _errors(*statuses: int) -> Json:
    return {str(status): _json("ErrorAnswer", "See the error's `code`.") for status in statuses}


def _parameter(where: str, name: str, schema: Json, description: str) -> Json:
    return {"in": where, "name": name, "required": where == "path", "schema": schema, "description": description}


def _id(prefix: str) -> Json:
    return _parameter("path", "id", {"type": "string"}, f"Of an answer: `{prefix}...`.")


def _header(name: str, schema: Json, description: str) -> Json:
    return _parameter("header", name, schema, description)


def _common_headers() -> list[Json]:
    return [
        _header("X-Request-Id", _text(128), "Comes back with the answer; used for nothing else."),
        _header("traceparent", {"type": "string"}, "W3C trace context: the parent of the request's trace."),
    ]


def _text(most: int) -> Json:
    return {"type": "string", "minLength": 1, "maxLength": most, "pattern": "^[\\x20-\\x7e]*$"}


_PURGE = _parameter("query", "purge", {"enum": [True]}, "Remove all that is stored of it. So it is without, too.")
