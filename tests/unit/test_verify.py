"""`pdq verify`: what counts as equal, with differences planted, and which prompts it asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from pdq import cli
from pdq.cli import exits
from pdq.engines.plain import PlainAnswer
from pdq.verify import prompts
from pdq.verify.compare import TOLERANCE, Given, Verdict, compare, kv_tokens

CHUNK = 32
PLAIN = PlainAnswer(prompt_tokens=70, ids=[5, 6, 7, 8], logprobs=[-0.1, -0.2, -0.3, -0.4], gaps=[2.0, 1.5, 0.01, 3.0])
GIVEN = Given(
    name="capital",
    request="r-1",
    order="prefill-first",
    prompt_tokens=70,
    ids=[5, 6, 7, 8],
    logprobs=[-0.1, -0.2, -0.3, -0.4],
    promised_tokens=64,
    loaded_tokens=64,
)


def judged(*, allow_recompute: bool = False, **changed: Any) -> Verdict:
    return compare(msgspec.structs.replace(GIVEN, **changed), PLAIN, CHUNK, allow_recompute=allow_recompute)


def test_equal_answers_with_their_kv_loaded_are_equal() -> None:
    verdict = judged()
    assert (verdict.outcome, verdict.cause, verdict.ok) == ("equal", "", True)
    assert (verdict.tokens, verdict.equal_tokens, verdict.first_delta, verdict.max_delta) == (4, 4, 0.0, 0.0)
    assert verdict.gap is None


def test_another_token_differs_and_tells_the_gap_there() -> None:
    verdict = judged(ids=[5, 6, 9, 8], logprobs=[-0.1, -0.2, -0.9, -0.4])
    assert (verdict.outcome, verdict.ok, verdict.equal_tokens, verdict.gap) == ("differs", False, 2, 0.01)
    assert verdict.max_delta == 0.0


def test_another_first_token_has_no_delta() -> None:
    verdict = judged(ids=[9, 6, 7, 8])
    assert (verdict.outcome, verdict.equal_tokens, verdict.gap) == ("differs", 0, 2.0)
    assert (verdict.first_delta, verdict.max_delta) == (None, None)


@pytest.mark.parametrize("ids", [[5, 6, 7], [5, 6, 7, 8, 9]])
def test_a_shorter_or_longer_answer_differs(ids: list[int]) -> None:
    verdict = judged(ids=ids, logprobs=[-0.1, -0.2, -0.3, -0.4, -0.5][: len(ids)])
    assert (verdict.outcome, verdict.equal_tokens, verdict.gap) == ("differs", min(len(ids), 4), None)


@pytest.mark.parametrize(("delta", "outcome"), [(0.9 * TOLERANCE, "equal"), (1.1 * TOLERANCE, "differs")])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_first_logprob_tells_bad_kv_before_any_token_does(delta: float, outcome: str, sign: int) -> None:
    verdict = judged(logprobs=[-0.1 + sign * delta, -0.2, -0.3, -0.4])
    assert verdict.outcome == outcome
    assert verdict.first_delta == pytest.approx(delta)


def test_later_logprobs_are_shown() -> None:
    verdict = judged(logprobs=[-0.1, -0.2, -0.5, -0.4])
    assert (verdict.outcome, verdict.first_delta, verdict.max_delta) == ("equal", 0.0, pytest.approx(0.2))


def test_another_prompt_differs_even_where_the_answer_does_not() -> None:
    verdict = judged(prompt_tokens=71)
    assert (verdict.outcome, verdict.cause) == ("differs", "the prompt has 71 tokens here, 70 there")


@pytest.mark.parametrize(
    ("promised", "loaded", "local", "cause"),
    [(64, 0, 0, "64"), (0, 0, 0, "64"), (64, 32, 0, "32"), (64, 0, 32, "32")],
    ids=["not loaded", "not promised", "partly", "partly local"],
)
def test_a_silent_recompute_fails_unless_it_is_allowed(promised: int, loaded: int, local: int, cause: str) -> None:
    kv = {"promised_tokens": promised, "loaded_tokens": loaded, "local_tokens": local}
    verdict = judged(**kv)
    assert (verdict.outcome, verdict.cause, verdict.ok) == ("recomputed", f"{cause} tokens of KV", False)
    assert (verdict.promised_tokens, verdict.loaded_tokens, verdict.local_tokens) == (promised, loaded, local)
    assert judged(allow_recompute=True, **kv).ok


def test_allowing_a_recompute_allows_no_wrong_token() -> None:
    assert judged(allow_recompute=True, loaded_tokens=0, ids=[5, 6, 9, 8]).outcome == "differs"


def test_kv_that_decode_still_has_need_not_be_loaded() -> None:
    assert judged(loaded_tokens=32, local_tokens=32).ok


def test_decode_only_has_no_kv_to_load() -> None:
    assert judged(order="decode-only", promised_tokens=0, loaded_tokens=0).ok


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (31, 0), (32, 31), (33, 32), (64, 63), (70, 64)])
def test_whole_chunks_move_and_the_last_token_is_computed(tokens: int, expected: int) -> None:
    assert kv_tokens(msgspec.structs.replace(GIVEN, prompt_tokens=tokens), CHUNK) == expected


def test_a_request_that_did_not_finish_fails() -> None:
    verdict = compare(Given(name="capital", request="r-1", error="queue_full"), PLAIN, CHUNK)
    assert (verdict.outcome, verdict.cause, verdict.ok) == ("failed", "queue_full", False)


def test_an_answer_without_a_token_fails() -> None:
    empty = msgspec.structs.replace(PLAIN, ids=[], logprobs=[], gaps=[])
    assert compare(msgspec.structs.replace(GIVEN, ids=[], logprobs=[]), empty, CHUNK).outcome == "failed"


def test_prompts_are_varied_named_and_new_with_every_tag() -> None:
    made = prompts.make(25, "ab12")
    assert len(made) == len({prompt.name for prompt in made}) == len({prompt.text for prompt in made}) == 25
    assert all(prompt.text.startswith("(ab12") for prompt in made)
    assert {prompt.raw for prompt in made[:10]} == {True, False}
    assert max(len(prompt.text) for prompt in made) > 3_000
    assert not {prompt.text[:8] for prompt in made} & {prompt.text[:8] for prompt in prompts.make(25, "ab13")}


def test_a_sim_stack_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = tmp_path / "models.toml"
    models.write_text('[models.sim]\nid = "pdq/sim"\ntokenizer = "bytes"\nmax_model_len = 4096\nvocab_size = 2048\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDQ_MODELS", str(models))
        patch.setenv("PDQ_HOME", str(tmp_path))
        code = cli.main(["verify", "--nats-url", "nats://127.0.0.1:1"])
    assert code == exits.USAGE
    assert "'sim' runs on the sim engine" in capsys.readouterr().err
