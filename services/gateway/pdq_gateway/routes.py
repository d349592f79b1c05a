"""What is served, and what of OpenAI's API is not."""

from __future__ import annotations

import re

OTHER = "other"

ROUTES = (
    "/v1/chat/completions",
    "/v1/chat/completions/{id}",
    "/v1/completions",
    "/v1/completions/{id}",
    "/v1/models",
    "/v1/models/{id}",
    "/v1/responses",
    "/v1/responses/{id}",
    "/v1/responses/{id}/cancel",
    "/openapi.json",
)

NOT_SERVED = {
    "assistants": "assistants",
    "audio": "audio",
    "batches": "batches",
    "conversations": "conversations",
    "embeddings": "embeddings",
    "files": "files",
    "fine_tuning": "fine-tuning",
    "images": "images",
    "moderations": "moderations",
    "realtime": "realtime sessions",
    "threads": "threads",
    "uploads": "uploads",
    "vector_stores": "vector stores",
    "videos": "videos",
}
"""By the part of a path after `/v1/`."""


def route_of(path: str) -> str:
    """The route of a path, as a label that has few values."""
    if path in ROUTES:
        return path
    if path.startswith("/v1/responses/") and path.endswith("/cancel"):
        return "/v1/responses/{id}/cancel"
    for collection in ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/responses"):
        if path.startswith(f"{collection}/"):
            return f"{collection}/{{id}}"
    return OTHER


def not_served(path: str) -> str | None:
    """What of OpenAI's API a path is about that is not served here."""
    found = re.match(r"/v1/([a-z_]+)(?:/|\Z)", path)
    return NOT_SERVED.get(found[1]) if found else None
