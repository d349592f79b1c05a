"""`python -m pdq_prefill`: a worker of the prefill stage. Settings: `PDQ_*` (pdq.settings)."""

from __future__ import annotations

from pdq.engines.early import EarlyProcess
from pdq.host import serve
from pdq.service import Stop, run

from pdq_prefill.handler import PrefillHandler


async def main(stop: Stop, core: EarlyProcess | None = None) -> None:
    """`core`: see `serve`."""
    await serve("prefill", {"prefill": PrefillHandler}, stop, core)


if __name__ == "__main__":
    run("prefill", main)
