"""`python -m pdq_decode`: a worker of the decode stage. Settings: `PDQ_*` (pdq.settings)."""

from __future__ import annotations

from pdq.engines.early import EarlyProcess
from pdq.host import serve
from pdq.service import Stop, run

from pdq_decode.handler import DecodeHandler


async def main(stop: Stop, core: EarlyProcess | None = None) -> None:
    """`core`: see `serve`."""
    await serve("decode", {"decode": DecodeHandler}, stop, core)


if __name__ == "__main__":
    run("decode", main)
