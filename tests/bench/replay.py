"""`python -m tests.bench.replay code=FILE conversation=FILE mooncake=FILE`: public traces, by every order.

Each order has a stack of its own (broker, router, sim workers: half of them for each stage), and all of a trace run
beside one another: the same requests at the same times, on the same machine. Traces follow each other. Traces are
those of docs/bench.md; what they run on is in tests/bench/replay_setup.py.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import psutil
import uvloop
from pdq.bench import records
from pdq.bench.workload import Load
from pdq.errors import PdqError

from tests.bench.replay_report import Replay, figures, table
from tests.bench.replay_setup import SETUPS, Setup
from tests.bench.replay_stack import Side

ORDERS = ("decode-only", "prefill-first", "decode-first", "auto")
TELL_S = 30.0
REST_S = 30.0
"""How long requests may go on after the last was due."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    traces: dict[str, Path]
    setups: Mapping[str, Setup]
    orders: tuple[str, ...]
    seconds: float
    warm_up_s: float
    rest_s: float = REST_S
    save: Path | None = None
    as_json: bool = False


async def run(options: Options, directory: Path) -> list[Replay]:
    """All traces, one after the other. Whatever was started is ended in any case."""
    found = []
    for name, path in options.traces.items():
        setup = options.setups[name]
        load = setup.load(path, warm_up_s=options.warm_up_s, duration_s=options.seconds)
        (directory / name).mkdir()
        found.append(await replay(name, setup, load, options, directory / name))
    return found


async def replay(name: str, setup: Setup, load: Load, options: Options, directory: Path) -> Replay:
    """One trace, by all orders at the same time."""
    before = os.getloadavg()[0]
    async with AsyncExitStack() as running:
        sides = [Side(order, setup, directory / order) for order in options.orders]
        for side in sides:
            _tell(f"{name}: starting {side.order}")
            await running.enter_async_context(side)
        began = _spent(sides)
        # Some time for the requests that are due last.
        until_s = options.warm_up_s + options.seconds + options.rest_s
        telling = asyncio.create_task(_progress(name, sides, len(load), until_s))
        try:
            async with asyncio.TaskGroup() as group:
                for side in sides:
                    group.create_task(side.run(load, warm_up_s=options.warm_up_s, until_s=until_s))
        finally:
            telling.cancel()
        ended = _spent(sides)
        lasted_s = max(record.end_s for side in sides for record in side.records)
        cores = {key: (ended[key] - began[key]) / lasted_s for key in ended}
        decided = [await asyncio.to_thread(side.decisions) for side in sides]
    if options.save is not None:
        for side in sides:
            records.write(options.save / f"{name}-{side.order}.jsonl", side.records)
    counted = [request for request in load if request.at_s >= options.warm_up_s]
    busy_ms = sum(setup.prompt_ms(request.input_tokens) for request in counted)
    return Replay(
        trace=name,
        setup=setup,
        seconds=options.seconds,
        requests=len(counted),
        input_tokens=sum(request.input_tokens for request in counted),
        output_tokens=sum(request.output_tokens for request in counted),
        prefill_load=busy_ms / 1e3 / options.seconds / setup.prefill_workers,
        load_average=(before, os.getloadavg()[0]),
        client_cores=cores["client"],
        orders=[
            figures(side.order, side.records, setup, options.seconds, each, dict(_of(side.order, cores)))
            for side, each in zip(sides, decided, strict=True)
        ],
    )


async def _progress(name: str, sides: Sequence[Side], requests: int, until_s: float) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        ended = ", ".join(f"{side.order} {len(side.records)}" for side in sides)
        _tell(f"{name}: {loop.time() - began:.0f} of at most {until_s:.0f} s; of {requests} requests ended: {ended}")
        await asyncio.sleep(TELL_S)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _spent(sides: Sequence[Side]) -> dict[str, float]:
    """CPU seconds, by order and role, and of the client, which is this process."""
    found = {f"{side.order} {role}": _cpu_s(pid) for side in sides for role, pid in side.pids.items()}
    return found | {"client": _cpu_s(os.getpid())}


def _cpu_s(pid: int) -> float:
    spent = psutil.Process(pid).cpu_times()
    return float(spent.user + spent.system)


def _of(order: str, cores: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    for name, value in cores.items():
        side, _, role = name.partition(" ")
        if side == order:
            yield role, value


def parse(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.replay", description=__doc__)
    parser.add_argument("traces", nargs="+", metavar="NAME=FILE", help=f"NAME: {', '.join(SETUPS)}")
    parser.add_argument("--duration", type=float, default=600.0, help="seconds of a replay (%(default)g)")
    parser.add_argument("--warm-up", type=float, default=30.0, help="seconds that do not count, first (%(default)g)")
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=ORDERS, help="(all)")
    parser.add_argument("--workers", type=int, default=100, help="of each order, half of each stage (%(default)s)")
    parser.add_argument("--factor", type=float, help="how many times slower they are than their profile")
    parser.add_argument("--speed", type=float, help="of the trace")
    parser.add_argument("--every", type=int, help="only each so manieth request")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write each request's times there, as JSON lines")
    parser.add_argument("--json", action="store_true", help="the figures as JSON on stdout")
    wanted = parser.parse_args(arguments)
    traces = dict(text.partition("=")[::2] for text in wanted.traces)
    if unknown := [text for text in traces if text not in SETUPS]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(SETUPS)}")
    if missing := [path for path in traces.values() if not Path(path).is_file()]:
        parser.error(f"there is no file {missing[0]!r}")
    if wanted.workers < 2 or wanted.duration <= 0 or wanted.warm_up < 0:
        parser.error("--workers must be at least 2, --duration above 0, --warm-up at least 0")
    changes = {name: value for name in ("factor", "speed", "every") if (value := getattr(wanted, name)) is not None}
    split = {"prefill_workers": wanted.workers // 2, "decode_workers": wanted.workers - wanted.workers // 2}
    return Options(
        traces={name: Path(path) for name, path in traces.items()},
        setups={name: msgspec.structs.replace(setup, **split, **changes) for name, setup in SETUPS.items()},
        orders=tuple(wanted.orders),
        seconds=wanted.duration,
        warm_up_s=wanted.warm_up,
        save=wanted.save,
        as_json=wanted.json,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    logging.getLogger("pdq").setLevel(logging.ERROR)
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="pdq-replay-") as directory,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            replays = runner.run(run(options, Path(directory)))
    except KeyboardInterrupt:
        return 130
    except PdqError as exc:
        _tell(str(exc))
        return 2
    if options.as_json:
        sys.stdout.buffer.write(msgspec.json.encode({"replays": replays}) + b"\n")
    else:
        print(table(replays))
    return 0


if __name__ == "__main__":
    sys.exit(main())
