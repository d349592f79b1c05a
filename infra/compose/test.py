"""`make test-compose`: docker-compose.yml as it is, on this machine, with no image registry.

Builds the project's images on stand-ins for their bases (stand_ins.py; PYTHON_IMAGE and NATS_IMAGE name real ones
instead), starts the stack, sends real requests through it from outside and from inside, restarts and kills parts of it,
looks at how its processes are confined, starts it again with a site at the edge, whose requests wait while the hub is
stopped, and takes all down again. Every step has a bound and says how long it took.
What needs images that are neither built here nor to be had (the profile `observability`) is not started.

Needs Docker with compose and buildx, or root on Debian to get them; about 10 GB of memory and 15 GB of disk.
KEEP_IMAGES=1 leaves the images and the build cache of the machine's own daemon where they are.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import daemon
import stand_ins

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = {"PYTHON_IMAGE": "pdq-stand-in/python:3.11", "NATS_IMAGE": "pdq-stand-in/nats:local"}
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PROJECT = f"pdq-test-{os.getpid()}"
LONG_LIVED = ("nats", "lmcache", "router", "gateway", "prefill", "decode")
AT_SITE = ("nats-edge", "forwarder", "gateway-edge")
OWN_IMAGES = ("cli", "nats", "lmcache", "router", "gateway", "prefill", "decode", "forwarder")
EDGE = {"COMPOSE_PROFILES": "edge", "NATS_CONFIG": "edge-hub.conf", "NATS_VOLUME": "nats-hub"}
"""As in edge.env."""

WHEEL_S, BUILD_S, UP_S, DOWN_S = 600.0, 2_400.0, 900.0, 120.0
RESTART_S, REQUEST_S, COMMAND_S = 600.0, 180.0, 60.0
RECOVERY_TRIES = 6
"""Requests until KV moves again after its tier was away: engines register anew within a second or two."""

QUESTION = (
    "Sailors have looked for lights on the coast since there were ships, and keepers have lit them, first with wood, "
    "then with oil, gas and lamps behind great lenses. Tell me in one short sentence what a lighthouse is for."
)


def main() -> None:
    began = time.monotonic()
    with daemon.daemon(), TemporaryDirectory(prefix="pdq-wheels-") as wheels:
        os.environ |= {
            "WHEELS": wheels,
            "COMPOSE_PROJECT_NAME": PROJECT,
            "VERSION": PROJECT,
            "COMPOSE_PROGRESS": "plain",
        }
        os.environ |= {name: str(free_port()) for name in ("NATS_PORT", "GATEWAY_PORT")} | cpu_halves()
        os.environ |= {name: str(free_port()) for name in ("EDGE_NATS_PORT", "EDGE_GATEWAY_PORT")}
        with step("base images"):
            base_images()
        with step("the CPU build of torch"):
            torch_wheel(Path(wheels))
        try:
            with step("build"):
                compose("--profile", "edge", "build", bound_s=BUILD_S)
            print(sizes())
            use()
            at_the_edge()
        except BaseException as exc:
            print(exc, file=sys.stderr)
            with suppress(SystemExit):
                print(compose("logs", "--no-color", "--tail", "60"), file=sys.stderr)
            raise
        finally:
            with step("down"):
                compose("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "40", bound_s=DOWN_S)
                if not os.environ.get("KEEP_IMAGES"):
                    docker("image", "rm", "--force", *(f"pdq-{name}:{PROJECT}" for name in OWN_IMAGES))
    print(f"==> passed in {(time.monotonic() - began) / 60:.1f} minutes")


def use() -> None:
    """What a person does with it, and what may happen to it."""
    with step("up"):
        compose("up", "--detach", "--wait", bound_s=UP_S)
    with step("request from this machine"):
        moved(submit("from outside"))
    with step("request from a container, streamed"):
        answer = compose("run", "--rm", "-T", "pdq", "submit", "--max-tokens", "16", QUESTION, bound_s=REQUEST_S)
        check(len(answer.strip()) > 0, "docker compose run pdq submit printed no answer")
    with step("over HTTP, with a key once there is a tenant"):
        check(over_http("") == 200, "the gateway does not answer on loopback without a key")
        made = json.loads(compose("run", "--rm", "-T", "pdq", "tenant", "add", "acme", "--json", bound_s=REQUEST_S))
        settled(lambda: over_http("") == 401, "a request without a key was let in after a tenant was added")
        check(over_http(made["key"]) == 200, "the tenant's key does not open")
    with step("confinement"):
        for service in LONG_LIVED:
            confined(service)
        shared_memory()
    with step("lmcache restarted"):
        compose("restart", "lmcache", bound_s=RESTART_S)
        recovers("after a restart of lmcache")
    with step("lmcache killed"):
        # Its only process besides init. Docker starts it again: it was not Docker that ended it.
        compose("exec", "-T", "lmcache", "sh", "-c", "kill -KILL $(cat /proc/1/task/1/children)")
        recovers("after the end of lmcache")
    with step("decode restarted"):
        compose("restart", "decode", bound_s=RESTART_S)
        recovers("after a restart of decode")
    with step("up again changes nothing that runs"):
        before = running()
        compose("up", "--detach", "--wait", bound_s=UP_S)
        check(running() == before, "a second `docker compose up` replaced containers")


def at_the_edge() -> None:
    """The same with a site, whose requests wait while the hub is away."""
    with step("down, and up with a site"):
        compose("down", "--timeout", "40", bound_s=DOWN_S)
        os.environ.update(EDGE)
        compose("up", "--detach", "--wait", bound_s=UP_S)
    with step("over HTTP at the site"):
        check(over_http("", "EDGE_GATEWAY_PORT") == 200, "the site's gateway does not answer on loopback")
        check(waiting_at_site() == 0, "a request that is answered still waits at the site")
    with step("confinement of the site"):
        for service in (*AT_SITE, "nats"):
            confined(service)
    with step("accepted at the site while the hub is stopped, and answered once it is back"):
        compose("stop", "nats", bound_s=RESTART_S)
        with ThreadPoolExecutor(1) as aside:
            asked = aside.submit(submit, "from the site", "EDGE_NATS_PORT", "edge")
            settled(lambda: waiting_at_site() == 1, "the site does not keep a request for the hub")
            check(not asked.done(), "a request was answered without the hub")
            compose("start", "nats", bound_s=RESTART_S)
            print(f"    {asked.result()['text'].strip()[:60]!r}")
        check(waiting_at_site() == 0, "a request that is answered still waits at the site")


def waiting_at_site() -> int:
    """Requests that the site has and the hub has not acknowledged."""
    told = compose("exec", "-T", "nats-edge", "wget", "-q", "-O", "-", "http://127.0.0.1:8222/jsz?streams=1&accounts=1")
    streams = [stream for account in json.loads(told)["account_details"] for stream in account["stream_detail"]]
    return int(next(stream["state"]["messages"] for stream in streams if stream["name"] == "PDQ_EDGE"))


def recovers(label: str) -> None:
    """All services are healthy again, and KV moves again; until then requests are answered without it."""
    compose("up", "--detach", "--wait", "--no-recreate", *LONG_LIVED, bound_s=RESTART_S)
    shared_memory()
    for attempt in range(RECOVERY_TRIES):
        result = submit(f"{label}, {attempt}")
        if result["kv"]["loaded_tokens"] > 0:
            return moved(result)
        time.sleep(1)
    raise SystemExit(f"FAILED: {label} no KV moved in {RECOVERY_TRIES} requests: {result}")


def submit(label: str, port: str = "NATS_PORT", tenant: str = "local") -> dict[str, Any]:
    """A prefill-first answer to a prompt that nothing has cached, through `pdq submit --json` on this machine."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PDQ_")}
    environment |= {"PDQ_NATS_URL": f"nats://127.0.0.1:{os.environ[port]}", "PDQ_TENANT": tenant}
    prompt = f"({label}) {QUESTION}"
    options = ["--json", "--order", "prefill-first", "--max-tokens", "16"]
    command = [sys.executable, "-m", "pdq", "submit", *options, prompt]
    result: dict[str, Any] = json.loads(run(command, REQUEST_S, environment))
    check(bool(result["text"].strip()), f"no text: {result}")
    check(result["route"]["order"] == "prefill-first", f"not by way of prefill: {result['route']}")
    return result


def over_http(key: str, port: str = "GATEWAY_PORT") -> int:
    """The status of a chat completion through a gateway's published port."""
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8}).encode()
    url = f"http://127.0.0.1:{os.environ[port]}/v1/chat/completions"
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=REQUEST_S) as answer:
            check(bool(json.load(answer)["choices"][0]["message"]["content"].strip()), "no text over HTTP")
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        return refused.code


def settled(condition: Callable[[], bool], failure: str) -> None:
    """Within COMMAND_S."""
    give_up = time.monotonic() + COMMAND_S
    while not condition():
        check(time.monotonic() < give_up, failure)
        time.sleep(0.5)


def moved(result: dict[str, Any]) -> None:
    kv = result["kv"]
    check(0 < kv["loaded_tokens"] == kv["promised_tokens"], f"KV did not move as promised: {result}")
    timings = result["timings_ms"]
    print(
        f"    {kv['loaded_tokens']} tokens of KV loaded, TTFT {timings['ttft']:.0f} ms: {result['text'].strip()[:60]!r}"
    )


def confined(service: str) -> None:
    """As docker-compose.yml says, seen from outside; and as the kernel says, of the process itself."""
    for container in compose("ps", "--quiet", service).split():
        found = json.loads(docker("inspect", container))[0]
        host = found["HostConfig"]
        check(host["ReadonlyRootfs"], f"{service}: its root file system can be written to")
        check(found["Config"]["User"] == "10001:10001", f"{service}: runs as {found['Config']['User']!r}")
        published = [one["HostIp"] for ports in found["NetworkSettings"]["Ports"].values() for one in ports or []]
        check(set(published) <= {"127.0.0.1"}, f"{service}: published on {published}")
        check(host["Memory"] > 0 and (host["PidsLimit"] or 0) > 0, f"{service}: without limits")
        status = docker("exec", container, "cat", "/proc/1/status")
        told = dict(re.findall(r"^(CapBnd|CapEff|NoNewPrivs|Seccomp|Uid):\s+(\S+)", status, re.MULTILINE))
        bare = {"CapBnd": "0" * 16, "CapEff": "0" * 16, "NoNewPrivs": "1", "Seccomp": "2", "Uid": "10001"}
        check(told == bare, f"{service}: {told}")


def shared_memory() -> None:
    """The engines see the segment that LMCache made, not one of an earlier start."""
    segments = {
        service: compose("exec", "-T", service, "sh", "-c", "stat -c '%n %i' /dev/shm/lmcache_l1_pool_*").strip()
        for service in ("lmcache", "prefill", "decode")
    }
    check(len(set(segments.values())) == 1, f"LMCache and the engines have different memories: {segments}")


def running() -> set[str]:
    return set(compose("ps", "--quiet", "--status", "running").split())


def base_images() -> None:
    if all(os.environ.get(name) for name in STAND_INS):
        return
    stand_ins.main(STAND_INS["PYTHON_IMAGE"], STAND_INS["NATS_IMAGE"])
    os.environ |= STAND_INS


def torch_wheel(folder: Path) -> None:
    """From where pip is configured for it here, its hash checked; else the build asks PyTorch's own index."""
    lock = (ROOT / "infra" / "locks" / "cpu.lock").read_text("utf-8")
    block = re.search(r"^torch==\S+ \\\n(?:    --hash=\S+(?: \\)?\n)+", lock, re.MULTILINE)
    assert block is not None
    requirement = folder / "torch.txt"
    requirement.write_text(block.group(), "utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    try:
        run([*command, "--dest", str(folder), "-r", str(requirement)], WHEEL_S)
    except SystemExit:
        print("    pip has none here; the build takes it from PyTorch's index")


def cpu_halves() -> dict[str, str]:
    """A half of the CPUs for each worker: engines that share them wait for each other."""
    cpus = [str(cpu) for cpu in sorted(os.sched_getaffinity(0))]
    middle = len(cpus) // 2
    return {"PREFILL_CPUS": ",".join(cpus[:middle]), "DECODE_CPUS": ",".join(cpus[middle:])} if middle else {}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def sizes() -> str:
    lines = docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}} {{.Size}}").splitlines()
    own = sorted(line.replace(f":{PROJECT}", "") for line in lines if f":{PROJECT} " in line)
    return "\n".join(f"    {line}" for line in own)


def compose(*arguments: str, bound_s: float = COMMAND_S) -> str:
    """`docker compose ...`, in the project's directory."""
    return run(["docker", "compose", *arguments], bound_s)


def docker(*arguments: str) -> str:
    return run(["docker", *arguments], COMMAND_S)


def run(command: list[str], bound_s: float, environment: dict[str, str] | None = None) -> str:
    """Its stdout. Ends the test when it fails or takes longer."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, timeout=bound_s, check=False, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired as exc:
        raise SystemExit(f"FAILED: {' '.join(command[:6])} took more than {bound_s:g} s") from exc
    if done.returncode:
        raise SystemExit(
            f"FAILED ({done.returncode}): {' '.join(command[:6])}\n{done.stdout[-500:]}{done.stderr[-4000:]}"
        )
    return done.stdout


def check(true: bool, otherwise: str) -> None:
    if not true:
        raise SystemExit(f"FAILED: {otherwise}")


@contextmanager
def step(name: str) -> Iterator[None]:
    print(f"==> {name}", flush=True)
    began = time.monotonic()
    yield
    print(f"    {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
