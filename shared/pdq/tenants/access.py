"""Whose a request is: by its API key, or, where no keys are needed, the local tenant's.

| mode | who needs a key |
|---|---|
| `auto` | on loopback: nobody until the first tenant was added, everybody from then on; elsewhere: everybody |
| `local` | as `auto` on loopback, wherever it listens: for a port that is published on loopback only |
| `keys` | everybody |
| `none` | nobody: whoever reaches the address is the local tenant |

Once a process has seen a tenant it goes on asking for keys, even when all of them are revoked or the bucket is lost.
"""

from __future__ import annotations

from pdq.addresses import is_loopback
from pdq.errors import Misconfigured, Unauthorized
from pdq.settings import AuthMode
from pdq.tenants.directory import Directory

SCHEME = "bearer"


class Access:
    """host: the address that a gateway listens on; local: the tenant of requests that need no key."""

    def __init__(self, directory: Directory, mode: AuthMode, *, host: str, local: str) -> None:
        self._directory = directory
        self._mode = mode
        self._host = host
        self._local = local

    def check_start(self) -> None:
        """Raise Misconfigured for an address that others reach, where nobody has a key. The directory is started."""
        if self._mode == "auto" and not is_loopback(self._host) and not self._directory.any_seen:
            raise Misconfigured(
                f"the gateway would listen on {self._host}, which others reach, and there is no API key: make one with "
                "`pdq tenant add NAME`; or set PDQ_GATEWAY_AUTH to `keys` (nobody is let in until there is one) or to "
                "`none` (everybody is let in)"
            )

    @property
    def needs_key(self) -> bool:
        match self._mode:
            case "auto":
                return self._directory.any_seen or not is_loopback(self._host)
            case "local":
                return self._directory.any_seen
            case _:
                return self._mode == "keys"

    def tenant_of(self, authorization: str | None) -> str:
        """The tenant of a request with this `Authorization` header (`Bearer <key>`). Raises Unauthorized.

        Where no key is needed the header is not looked at: OpenAI's clients always send one.
        """
        if not self.needs_key:
            return self._local
        if not authorization:
            raise Unauthorized("no API key: send it as `Authorization: Bearer <key>`")
        scheme, _, key = authorization.strip().partition(" ")
        if scheme.lower() != SCHEME or not key.strip():
            raise Unauthorized("the Authorization header is not `Bearer <key>`")
        return self._directory.tenant_of(key.strip())
