"""What is changed of LMCache's peer-to-peer transfers: agents that pause, and peers that take another's place."""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple

import pytest
from pdq.kv.nixl import Round, Successions

PROGRAM = """
from pdq.kv import nixl
api = nixl._binding()
made = []
make = api.nixlBind.nixlAgent
api.nixlBind.nixlAgent = lambda name, config: made.append(config.pthrDelay) or make(name, config)
if {paused}:
    nixl.adapt()
api.nixl_agent("test", api.nixl_agent_config(backends=[]))
print(*made)
"""


@pytest.mark.parametrize(("paused", "pause_us"), [(True, "100"), (False, "0")])
def test_an_agent_pauses_only_where_it_was_told_to(paused: bool, pause_us: str) -> None:
    pytest.importorskip("nixl_cu12")
    command = [sys.executable, "-c", PROGRAM.format(paused=paused)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split()[-1] == pause_us


class At(NamedTuple):
    p2p_advertised_url: str


OLD, NEW, OTHER = {"old": At("a:1")}, {"new": At("a:1")}, {"other": At("b:1")}


def test_peers_of_their_own_addresses_come_stay_and_go() -> None:
    judge = Successions().judge
    assert judge({}, OLD | OTHER) == Round(set(), {"old", "other"})
    assert judge(OLD | OTHER, OLD | OTHER) == Round(set(), {"old", "other"})
    assert judge(OLD | OTHER, OTHER) == Round(set(), {"other"})  # LMCache takes its leave, after some rounds


def test_a_successor_is_connected_once_its_forerunner_has_left_and_that_one_never_again() -> None:
    judge = Successions().judge
    assert judge(OLD | OTHER, OLD | NEW | OTHER) == Round({"old"}, {"other"})
    assert judge(OTHER, OLD | NEW | OTHER) == Round(set(), {"new", "other"})
    assert judge(NEW | OTHER, OLD | NEW | OTHER) == Round(set(), {"new", "other"})
    assert judge(NEW | OTHER, NEW | OTHER) == Round(set(), {"new", "other"})


def test_a_forerunner_that_is_no_longer_listed_leaves_before_its_successor_is_connected() -> None:
    judge = Successions().judge
    assert judge(OLD, NEW) == Round({"old"}, set())
    assert judge({}, NEW) == Round(set(), {"new"})


def test_of_two_that_are_new_at_one_address_neither_is_connected_until_one_is_listed() -> None:
    judge = Successions().judge
    assert judge({}, OLD | NEW | OTHER) == Round(set(), {"other"})
    assert judge(OTHER, NEW | OTHER) == Round(set(), {"new", "other"})


def test_a_third_takes_the_place_of_the_second() -> None:
    judge = Successions().judge
    third = {"third": At("a:1")}
    assert judge(OLD, OLD | NEW) == Round({"old"}, set())
    assert judge({}, OLD | NEW) == Round(set(), {"new"})
    assert judge(NEW, OLD | NEW | third) == Round({"new"}, set())
    assert judge({}, NEW | third) == Round(set(), {"third"})
