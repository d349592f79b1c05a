"""How pdq's processes share two CPUs in `pdq bench compare`: who has which, who goes first, and what a step holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from pdq import settings
from pdq.bench.compare import setups, topologies
from pdq.bench.compare.hardware import Hardware, Place
from pdq.bench.compare.topologies import Common
from pdq.settings import EngineSettings
from pdq.up.layout import Layout
from pdq.up.model import SIM
from pdq.up.process import Spec

CPUS = Hardware(Place(cpus="0"), Place(cpus="1"))
GPUS = Hardware(Place(devices="0"), Place(devices="1"))


def specs(home: Path, letter: str, places: Hardware, **environ: str) -> dict[str, Spec]:
    """Of the tiers and the workers, by name."""
    layout = Layout.of(home)
    layout.root.mkdir(parents=True)
    layout.prepare()
    (setup,) = setups.wanted(letter, "")
    common = Common(SIM, "vllm", places, environ, 60.0)
    stack = topologies._Pdq(setup, common, layout, cast(Any, None))
    stack._plan.brokers()
    tiers = [spec for level in stack._tiers() for spec in level]
    return {spec.name: spec for spec in (*tiers, *stack._workers())}


def yields(spec: Spec) -> int:
    """How far a process yields to others."""
    words = list(spec.command)
    return int(words[words.index("nice") + 2]) if "nice" in words else 0


def engine(spec: Spec) -> EngineSettings:
    return settings.load(EngineSettings, spec.environment)


def test_what_passes_tokens_on_goes_before_kv_and_kv_before_prefill(tmp_path: Path) -> None:
    found = specs(tmp_path, "d", CPUS)
    assert {name: yields(spec) for name, spec in found.items()} == {
        "lmcache-prefill": 5, "lmcache-decode": 5, "prefill": 10, "decode": 0,
    }  # fmt: skip
    assert all(spec.command[:3] == ("taskset", "--cpu-list", "0") for spec in found.values())


@pytest.mark.parametrize(("letter", "places"), [("c", CPUS), ("d", GPUS)])
def test_elsewhere_nobody_yields_and_steps_are_the_default(tmp_path: Path, letter: str, places: Hardware) -> None:
    found = specs(tmp_path, letter, places)
    assert not any(map(yields, found.values()))
    steps = {engine(spec).max_num_batched_tokens for name, spec in found.items() if "lmcache" not in name}
    assert steps == {EngineSettings().max_num_batched_tokens}


@pytest.mark.parametrize(
    ("environ", "requests", "step"),
    [
        ({}, 8, 10),
        ({"PDQ_WORKER_SLOTS": "4"}, 4, 6),
        ({"PDQ_ENGINE_MAX_NUM_SEQS": "32"}, 32, 34),
        ({"PDQ_ENGINE_MAX_NUM_BATCHED_TOKENS": "64"}, 8, 64),
    ],
)
def test_a_step_of_decode_holds_little_more_than_its_requests(
    tmp_path: Path, environ: dict[str, str], requests: int, step: int
) -> None:
    found = specs(tmp_path, "d", CPUS, **environ)
    decode, prefill = engine(found["decode"]), engine(found["prefill"])
    assert (decode.max_num_seqs, decode.max_num_batched_tokens) == (requests, step)
    assert prefill.max_num_batched_tokens == int(environ.get("PDQ_ENGINE_MAX_NUM_BATCHED_TOKENS", 512))
