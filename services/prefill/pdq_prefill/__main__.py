"""`python -m pdq_prefill`: a worker of the prefill stage. Settings: `PDQ_*` (pdq.settings)."""

from __future__ import annotations

import asyncio

from pdq.host import serve
from pdq.service import run

from pdq_prefill.handler import PrefillHandler


async def main(stop: asyncio.Event) -> None:
    await serve("prefill", {"prefill": PrefillHandler}, stop)


if __name__ == "__main__":
    run("prefill", main)
