"""`pdq up --edge`: a hub and a site on one machine, as real processes with the sim engine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pdq.cli import exits
from pdq.up import record

from tests.integration.test_up import LONG, PACE, PROCESSES, SHORT, TIMEOUT_S, Home, nothing_left, wait
from tests.sse import frames, text_of

AT_SITE = ["site-nats", "forwarder", "site-gateway"]


class Edge:
    """A stack with a site. `told`: what `pdq up` printed. `site`: what a command needs to speak to the site."""

    def __init__(self, home: Home, told: str) -> None:
        self.home = home
        self.told = told
        self.stack = home.json("status")["stack"]
        self.site = {"PDQ_NATS_URL": self.stack["site"]["nats_url"], "PDQ_TENANT": self.stack["site"]["name"]}

    def at_site(self, *arguments: str) -> Any:
        """The object that a command prints at the site."""
        done = self.home.run(*arguments, "--json", **self.site)
        assert done.returncode == 0, done
        return json.loads(done.stdout)

    def process(self, name: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = self.home.json("status")["stack"]["processes"]
        return next(process for process in found if process["name"] == name)


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    home = Home(tmp_path_factory.mktemp("edge"), PDQ_ENGINE_SIM_PROFILE=PACE)
    done = home.run("up", "--engine", "sim", "--edge", "--detach")
    assert done.returncode == 0, done
    processes = home.processes()
    yield Edge(home, done.stderr.decode())
    assert home.run("down").returncode == 0
    nothing_left(home, processes)


def test_the_site_is_listed(edge: Edge) -> None:
    assert [process["name"] for process in edge.stack["processes"]] == ["supervisor", *PROCESSES, *AT_SITE]
    assert all(process["ready"] for process in edge.stack["processes"])
    site, ports = edge.stack["site"], {one["name"]: one["ports"] for one in edge.stack["processes"]}
    assert site["name"] == "edge"
    assert site["nats_url"] == f"nats://127.0.0.1:{ports['site-nats']['nats']}" != edge.stack["nats_url"]
    assert site["api_url"] == f"http://127.0.0.1:{ports['site-gateway']['api']}/v1" != edge.stack["api_url"]
    shown = edge.home.run("status").stdout.decode()
    for text in (*AT_SITE, site["nats_url"], site["api_url"], "wait at the site for the hub: 0", "2 workers alive"):
        assert text in shown


def test_the_command_that_up_shows_is_answered_by_way_of_the_site(edge: Edge) -> None:
    shown = re.search(r'PDQ_NATS_URL=\S+ PDQ_TENANT=edge pdq submit "[^"]+"', edge.told)
    assert shown is not None, edge.told
    path = f"{Path(sys.executable).parent}{os.pathsep}{edge.home.environ['PATH']}"
    command = f"{shown[0]} --id shown {' '.join(SHORT)}"
    done = subprocess.run(
        command,
        shell=True,
        env={**edge.home.environ, "PATH": path},
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.strip(), done
    assert edge.at_site("status", "shown")["state"] == "finished"
    # At the hub it is a request of the tenant that has the site's name.
    assert edge.home.run("status", "shown").returncode == exits.USAGE
    assert edge.home.run("status", "shown", PDQ_TENANT="edge").returncode == 0
    assert "pdq.forwarder" in edge.home.layout.log("forwarder").read_text()


def test_the_gateway_of_the_site_streams(edge: Edge) -> None:
    fields = {"max_tokens": 60, "temperature": 0, "stream": True}
    body = {"model": "sim", "messages": [{"role": "user", "content": LONG}], **fields}
    asked = urllib.request.Request(
        f"{edge.stack['site']['api_url']}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
        found = frames(answer.read())
    assert len(found) > 10 and found[-1].data == "[DONE]"
    assert text_of(found) == edge.home.json("submit", LONG, "--temperature", "0", "--max-tokens", "60")["text"]


def test_the_site_accepts_while_the_hub_stands_still(edge: Edge) -> None:
    hub = edge.process("nats")["pid"]
    os.kill(hub, signal.SIGSTOP)
    try:
        asked = edge.home.begin("submit", "--json", LONG, *SHORT, **edge.site)
        wait("the request at the site", lambda: edge.at_site("status")["site"] == {"waiting": 1})
    finally:
        os.kill(hub, signal.SIGCONT)
    out, told = asked.communicate(timeout=TIMEOUT_S)
    assert asked.returncode == 0 and json.loads(out)["usage"]["completion_tokens"] == 5, told
    assert edge.at_site("status")["site"] == {"waiting": 0}


@pytest.mark.parametrize("name", ["site-nats", "forwarder"])
def test_a_process_of_the_site_that_dies_is_restarted(edge: Edge, name: str) -> None:
    before = edge.process(name)
    os.kill(before["pid"], signal.SIGKILL)

    def runs_again() -> bool:
        now = edge.process(name)
        return bool(now["restarts"] == 1 and now["pid"] != before["pid"] and now["ready"])

    wait("the restart", runs_again)
    assert edge.at_site("submit", LONG, *SHORT)["usage"]["completion_tokens"] == 5


def test_a_site_that_cannot_start_is_named(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.layout.prepare()
    (home.layout.site_store / "jetstream").touch()
    done = home.run("up", "--engine", "sim", "--edge")
    assert done.returncode == exits.FAILED
    assert b"pdq: stack_failed: site-nats ended while the stack was starting" in done.stderr
    assert not record.locked(home.layout)
