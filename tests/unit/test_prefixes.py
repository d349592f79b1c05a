"""What a router remembers of prompts, and what it makes of it."""

from __future__ import annotations

import pytest
from pdq.bus import Stored
from pdq.log import first
from pdq.messages import Promise, StageName, encode_json
from pdq_router.prefixes import POSITIONS_PER_PROMPT, Likely, Prefixes, positions

CHUNK = 4
MANY = 10_000
SYSTEM = tuple(range(8))


def names(prompt: tuple[int, ...], tenant: str = "t", model: str = "m") -> tuple[str, ...]:
    return positions(model, tenant, prompt, CHUNK)


def claim(prefix: str, worker: str, stage: StageName = "decode") -> Stored:
    return stored(encode_json(first("claim", stage=stage, worker=worker, prefix=prefix)))


def stored(data: bytes) -> Stored:
    return Stored(seq=1, subject="pdq.live.t.r.state", data=data, headers={}, time_s=0.0)


def test_positions_are_whole_chunks_and_name_all_before_them() -> None:
    whole = names((1, 2, 3, 4, 5, 6, 7, 8, 9))
    assert len(whole) == 2 and all(len(name) == 16 for name in whole)
    assert names((1, 2, 3, 4, 5, 6, 7, 8)) == whole
    assert names((1, 2, 3, 4, 0, 6, 7, 8))[0] == whole[0]
    assert names((1, 2, 3, 4, 0, 6, 7, 8))[1] != whole[1]
    assert names((0, 2, 3, 4, 5, 6, 7, 8))[1] != whole[1], "the same second chunk after another first one"
    assert names((1, 2, 3)) == ()


def test_tenants_and_models_never_meet() -> None:
    prompt = tuple(range(16))
    found = [set(names(prompt, tenant, model)) for tenant, model in (("t", "m"), ("u", "m"), ("t", "n"), ("t m", ""))]
    assert sum(map(len, found)) == len(set().union(*found)) == 16


def test_the_next_turn_prefers_the_worker_of_the_last() -> None:
    known, turn = Prefixes(MANY), (*SYSTEM, 50, 51, 52, 53)
    known.hear(claim(names(turn)[-1], "d1"))
    assert known.likely(names(turn + (60,) * 9), CHUNK) == Likely(12, "d1")
    known.hear(claim(names(turn)[-1], "d2"))
    assert known.likely(names(turn + (60,) * 9), CHUNK) == Likely(12, "d2"), "the newest counts"


def test_a_shared_begin_is_known_and_prefers_nobody() -> None:
    known, one = Prefixes(MANY), SYSTEM + (50,) * 4
    known.routed(names(one))
    assert known.likely(names(one), CHUNK) == Likely(), "nobody has computed it yet"
    known.hear(claim(names(one)[-1], "d1"))
    assert known.likely(names(SYSTEM + (51,) * 4), CHUNK) == Likely(8, "")
    stranger = Prefixes(MANY)
    stranger.hear(claim(names(one)[-1], "d1"))
    assert stranger.likely(names(SYSTEM + (51,) * 4), CHUNK) == Likely(), "another router hears of ends only"


def test_a_longer_position_counts_for_tokens_and_a_shorter_one_may_name_the_worker() -> None:
    known, turn = Prefixes(MANY), SYSTEM + (50,) * 4
    known.hear(claim(names(SYSTEM)[-1], "d1"))
    prefilled = first("prefilled", prefix=names(turn)[-1], promise=Promise(tokens=12))
    known.hear(stored(encode_json(prefilled)))
    assert known.likely(names(turn), CHUNK) == Likely(12, "d1")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b'{"event": 7}',
        encode_json(first("claim", stage="decode", worker="d1")),
        claim(names(SYSTEM)[-1], "p1", "prefill").data,
        encode_json(first("routed", prefix=names(SYSTEM)[-1])),
        encode_json(first("prefilled", prefix=names(SYSTEM)[-1], promise=Promise(cause="store_late"))),
    ],
    # Records hold a nonce, and a test's name must be the same in each process.
    ids=["empty", "not_text", "wrong_type", "no_prefix", "of_prefill", "no_owner", "no_kv"],
)
def test_other_records_teach_nothing(data: bytes) -> None:
    known = Prefixes(MANY)
    known.hear(stored(data))
    assert known.likely(names(SYSTEM), CHUNK) == Likely()


def test_what_was_used_least_recently_is_forgotten() -> None:
    known = Prefixes(3)
    prompts = [(number,) * CHUNK for number in range(4)]
    for prompt in prompts[:3]:
        known.hear(claim(names(prompt)[-1], "d"))
    assert known.likely(names(prompts[0]), CHUNK).worker == "d"
    known.hear(claim(names(prompts[3])[-1], "d"))
    assert [known.likely(names(prompt), CHUNK).worker for prompt in prompts] == ["d", "", "d", "d"]


def test_prompts_that_nobody_claims_are_forgotten() -> None:
    known, one, two = Prefixes(POSITIONS_PER_PROMPT), SYSTEM + (50,) * 4, SYSTEM + (51,) * 4
    known.routed(names(one))
    known.routed(names(two))
    known.hear(claim(names(one)[-1], "d"))
    assert known.likely(names(SYSTEM), CHUNK) == Likely()
    known.hear(claim(names(two)[-1], "d"))
    assert known.likely(names(SYSTEM), CHUNK) == Likely(8, "")
