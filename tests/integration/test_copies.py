"""Workers that are copies of one process which has imported everything: real services, with the sim engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from pdq.up import record
from pdq.up.copies import Copy, Template
from pdq.up.layout import Layout
from pdq.up.model import SIM, write
from pdq.up.process import Child, Guard, Spec
from pdq.up.record import Record
from pdq.up.supervisor import Recorder, Supervisor

BOUND_S = 60.0
NAMES = ("prefill", "decode")
MODULES = ("pdq_prefill.__main__", "pdq_decode.__main__")


class Setup:
    """A template of workers without a broker: they start, and wait for it."""

    def __init__(self, layout: Layout, guard: Guard) -> None:
        self.layout = layout
        self.guard = guard
        write(SIM, layout.models)
        self.template = Template(os.environ, layout.log("template"), guard, MODULES)

    def spec(self, name: str) -> Spec:
        environ = {
            **os.environ,
            "PDQ_MODELS": str(self.layout.models),
            "PDQ_NATS_URL": "nats://127.0.0.1:9",
            "PDQ_ENGINE_KIND": "sim",
            "PDQ_ENGINE_SIM_KV_DIR": str(self.layout.sim_kv),
            "PDQ_HTTP_PORT": "0",
        }

        async def waits() -> bool:
            return "health server" in self.log(name)

        return Spec(name, (sys.executable, "-m", f"pdq_{name}"), environ, waits)

    def log(self, name: str) -> str:
        file = self.layout.log(name)
        return file.read_text() if file.exists() else ""

    async def copies(self) -> dict[str, Copy]:
        return await self.template.copies(
            [self.spec(name) for name in NAMES], {name: self.layout.log(name) for name in NAMES}
        )


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    layout = Layout.of(tmp_path)
    layout.prepare()
    layout.sim_kv.mkdir()
    with record.claim(layout, wait_s=0) as lock:
        guard = Guard(lock)
        made = Setup(layout, guard)
        try:
            yield made
        finally:
            made.template.close()
            await asyncio.to_thread(guard.close)


async def until_ended(copy: Copy) -> int:
    async with asyncio.timeout(BOUND_S):
        while copy.poll() is None:
            await asyncio.sleep(0.05)
    assert copy.returncode is not None
    return copy.returncode


async def test_a_copy_is_a_process_like_any_other(setup: Setup) -> None:
    assert await setup.template.imported()
    copies = await setup.copies()
    children = [Child(setup.spec(name), setup.layout.log(name), setup.guard, copies[name]) for name in NAMES]
    setup.template.go(len(copies))
    for name, child in zip(NAMES, children, strict=True):
        async with asyncio.timeout(BOUND_S):
            while not await child.spec.ready():
                await asyncio.sleep(0.05)
        assert os.getpgid(child.pid) == os.getsid(child.pid) == child.pid
        assert psutil.Process(child.pid).ppid() == os.getpid()
        assert f"service={name} logger=pdq.service msg=started pid={child.pid}" in setup.log(name)
    await asyncio.gather(*(child.stop() for child in children))
    # Stopped while it waits for a broker.
    assert [child.ended() for child in children] == [0, 0]


async def test_copies_that_are_not_told_to_go_end_by_themselves(setup: Setup) -> None:
    assert await setup.template.imported()
    copies = await setup.copies()
    assert set(copies) == set(NAMES)
    setup.template.close()
    assert [await until_ended(copy) for copy in copies.values()] == [0, 0]
    assert not any(setup.log(name) for name in NAMES)
    setup.template = Template(os.environ, setup.layout.log("template"), setup.guard, MODULES)


async def test_a_template_that_cannot_import_is_told(setup: Setup, tmp_path: Path) -> None:
    with contextlib.closing(Template(os.environ, tmp_path / "log", setup.guard, ("pdq.no_such_module",))) as template:
        assert not await template.imported()
    assert "pdq.no_such_module" in (tmp_path / "log").read_text()


async def test_one_with_a_second_thread_makes_no_copies(setup: Setup, tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with contextlib.closing(Template(environ, tmp_path / "log", setup.guard, ("threaded",))) as template:
        assert not await template.imported()
    assert "1 threads besides the main one" in (tmp_path / "log").read_text()


async def test_where_the_template_dies_workers_start_by_themselves(setup: Setup) -> None:
    assert await setup.template.imported()
    os.kill(setup.template._process.pid, signal.SIGKILL)
    recorder = Recorder(setup.layout, Record(pid=os.getpid(), started=0.0), lambda _: None)
    supervisor = Supervisor(setup.layout, recorder, setup.guard)
    supervisor.expect(*NAMES)
    async with asyncio.timeout(BOUND_S):
        await supervisor.start_copies([setup.spec(name) for name in NAMES], setup.template)
    assert [process.state for process in recorder.record.processes] == ["ready", "ready"]
    for process in recorder.record.processes:
        assert psutil.Process(process.pid).cmdline()[-1] == f"pdq_{process.name}"
    await supervisor.stop()
