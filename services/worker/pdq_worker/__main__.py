"""`python -m pdq_worker`: both stages on one engine, for a single GPU. Settings: `PDQ_*` (pdq.settings)."""

from __future__ import annotations

from pdq.host import serve
from pdq.service import Stop, run
from pdq_decode.handler import DecodeHandler
from pdq_prefill.handler import PrefillHandler


async def main(stop: Stop) -> None:
    await serve("both", {"prefill": PrefillHandler, "decode": DecodeHandler}, stop)


if __name__ == "__main__":
    run("worker", main)
