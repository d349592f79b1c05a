"""What a load is put on: something that takes a body and tells of the tokens as they come."""

from __future__ import annotations

import time
from typing import Literal, NamedTuple, Protocol

from pdq.errors import PdqError

Api = Literal["completions", "chat"]


class Ask(NamedTuple):
    """A request as it is sent. `timeout_s`: after which nobody waits for it."""

    body: bytes
    timeout_s: float


class Failed(PdqError):
    """There is no answer, or not all of it. `code`: the server's, or `http_<status>`, `timeout`, `connection`, ..."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Hearing:
    """What is heard of one answer. Times are seconds since it was asked for."""

    def __init__(self) -> None:
        self.request = ""
        """Its id, where the target has one."""
        self.prompt_tokens = 0
        """As the server counts them; 0: it does not tell."""
        self.completion_tokens = 0
        self.chunks: list[tuple[float, int]] = []
        """Each time text came: when, and how many tokens that was; 0: not known."""
        self.end_s = 0.0
        """When the last came that belongs to the answer, its end included."""
        self.begun = time.monotonic()

    def chunk(self, num_tokens: int = 0) -> None:
        self.end()
        self.chunks.append((self.end_s, num_tokens))

    def end(self) -> None:
        """The end of the answer, when it comes by itself."""
        self.end_s = round(time.monotonic() - self.begun, 6)

    def usage(self, prompt_tokens: int, completion_tokens: int) -> None:
        self.prompt_tokens, self.completion_tokens = prompt_tokens, completion_tokens


class Target(Protocol):
    """Something that answers. `api`: the shape of its bodies; `model`: what they name."""

    api: Api
    model: str

    async def ask(self, ask: Ask, hearing: Hearing) -> None:
        """Send it, and tell of the answer until it ends. Cancelled, the request is ended where it runs.

        Raises PdqError, whose `code` tells what went wrong.
        """
