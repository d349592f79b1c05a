"""Loads: when requests are due, what public traces say, what the generator makes, and prompts of the lengths wanted."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from itertools import islice, pairwise
from pathlib import Path
from random import Random

import pytest
from pdq.bench import traces
from pdq.bench.generator import PROFILES, Name, generate, timed
from pdq.bench.prompts import WORDS, Prompts, Scale
from pdq.bench.target import Api
from pdq.bench.workload import BLOCK_TOKENS, TimedRequest, alike, bursty, checked, constant, faster, poisson, within
from pdq.errors import Rejected

# ---- arrivals


def dispersion(times: Iterable[float], window_s: float) -> float:
    """Variance by mean of the numbers of arrivals in windows; 1: a Poisson process."""
    counts: dict[int, int] = {}
    for time in times:
        counts[int(time / window_s)] = counts.get(int(time / window_s), 0) + 1
    whole = [counts.get(place, 0) for place in range(max(counts))]
    return statistics.pvariance(whole) / statistics.mean(whole)


def test_constant_arrivals() -> None:
    assert list(islice(constant(4.0), 4)) == [0, 0.25, 0.5, 0.75]


def test_poisson_arrivals() -> None:
    times = list(islice(poisson(5.0, Random(1)), 20_000))
    gaps = [after - before for before, after in pairwise(times)]
    assert times[0] == 0
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.03)
    assert statistics.pstdev(gaps) == pytest.approx(0.2, rel=0.03)
    assert dispersion(times, 10) == pytest.approx(1, abs=0.15)
    assert times == list(islice(poisson(5.0, Random(1)), 20_000))
    assert times != list(islice(poisson(5.0, Random(2)), 20_000))


def test_bursty_arrivals() -> None:
    times = list(islice(bursty(5.0, 10.0, 1.0, Random(1)), 20_000))
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(5, rel=0.1)
    assert dispersion(times, 10) == pytest.approx(51, rel=0.2)
    assert dispersion(islice(bursty(5.0, 10.0, 0.0, Random(1)), 20_000), 10) == pytest.approx(1, abs=0.15)


def test_a_load_is_bounded() -> None:
    def load(**bounds: float) -> list[float]:
        bounds = {"warm_up_s": 0, "duration_s": 0, "requests": 0} | bounds
        return [request.at_s for request in within(alike(constant(1.0), 8, 2), **bounds)]  # type: ignore[arg-type]

    assert load(duration_s=3) == [0, 1, 2]
    assert load(requests=2) == [0, 1]
    assert load(warm_up_s=2, requests=1) == [0, 1, 2]
    assert load(warm_up_s=2, duration_s=1) == [0, 1, 2]
    with pytest.raises(Rejected, match="warm-up"):
        checked([TimedRequest(at_s=1.0, input_tokens=1, output_tokens=1)], 2.0)


# ---- traces

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:04.9799600,4808,10
2023-11-16 18:17:03.9799609,3180,8
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens,NumImages
2024-05-10 23:59:59.500000+00:00,2162,5,0
2024-05-11 00:00:00.009930+00:00,2399,6,0
"""
MOONCAKE = """{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 14]}
{"timestamp": 4500, "input_length": 512, "output_length": 7, "hash_ids": [0]}
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118.5,GPT-4,417,276,693,API log
"""


def read(tmp_path: Path, text: str, format: traces.Format | None = None) -> list[TimedRequest]:
    path = tmp_path / "trace"
    path.write_text(text, "utf-8")
    return traces.read(path, format)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (AZURE, [(0, 3180, 8), (1, 4808, 10)]),
        ("\ufeff" + AZURE.replace("\n", "\r\n"), [(0, 3180, 8), (1, 4808, 10)]),
        (AZURE_2024, [(0, 2162, 5), (0.50993, 2399, 6)]),
        (MOONCAKE, [(0, 600, 5), (1.5, 512, 7)]),
        (BURSTGPT, [(0, 472, 18), (113.5, 417, 276)]),
        ("Session ID," + BURSTGPT.replace("\n", "\n1,", 3), [(0, 472, 18), (113.5, 417, 276)]),
    ],
)
def test_traces(tmp_path: Path, text: str, wanted: list[tuple[float, int, int]]) -> None:
    found = read(tmp_path, text)
    assert [(request.input_tokens, request.output_tokens) for request in found] == [row[1:] for row in wanted]
    assert [request.at_s for request in found] == pytest.approx([row[0] for row in wanted], abs=1e-6)


def test_a_replay_may_be_faster(tmp_path: Path) -> None:
    assert [request.at_s for request in faster(read(tmp_path, MOONCAKE), 3.0)] == [0, 0.5]
    assert [request.blocks for request in read(tmp_path, MOONCAKE)] == [(0, 14), (0,)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "line 1: neither"),
        ("a,b,c\n1,2,3\n", "line 1: neither"),
        (AZURE.splitlines()[0] + "\n", "has no requests"),
        (AZURE + "2023-11-16 18:17:04,many,8\n", "line 4: 'many' is no number of tokens"),
        (AZURE + "2023-11-16 18:17:04,0,8\n", "line 4: '0' is no number of tokens"),
        (AZURE + "2023-11-16 18:17:04,-5,8\n", "line 4: '-5' is no number"),
        (AZURE + "2023-11-16 18:17:04,5.5,8\n", "line 4: '5.5' is no number"),
        (AZURE + "2023-11-16 18:17:04,99999999999,8\n", "line 4: '99999999999' is no number"),
        (AZURE + "yesterday,5,8\n", "line 4: 'yesterday' is no time"),
        (AZURE + "2023-11-16 18:17:04,5\n", "line 4: 2 fields; the header has 3"),
        (AZURE + '2023-11-16 18:17:04,5,"8\n', "line 4: "),
        (BURSTGPT + "nan,GPT-4,417,276,693,API log\n", "line 5: 'nan' is no time in seconds"),
        (MOONCAKE + "{\n", "line 3: "),
        (MOONCAKE + '{"timestamp": 1, "input_length": 5, "output_length": 5}\n', "line 3: .*hash_ids"),
        (MOONCAKE.replace("[0]", "[0, 1]"), "line 2: 2 hash_ids for 512 tokens"),
        (MOONCAKE.replace("[0]", "[-1]"), "line 2: a hash_id is negative"),
        (MOONCAKE.replace("512", '"512"'), "line 2: "),
        (MOONCAKE.replace('"output_length": 7', '"output_length": 0'), "line 2: '0' is no number"),
    ],
)
def test_a_trace_that_is_not_what_it_says(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(Rejected, match=why):
        read(tmp_path, text)


def test_a_format_may_be_named(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match="line 1: the header has no 'Timestamp'"):
        read(tmp_path, AZURE, "burstgpt")
    path = tmp_path / "trace"
    path.write_bytes(AZURE.encode("utf-16"))
    with pytest.raises(Rejected, match="not UTF-8"):
        traces.read(path)


# ---- the generator

FITS: dict[Name, tuple[float, float, float, float]] = {
    "azure-code": (2047.8, 1973.8, 27.9, 59.9),
    "azure-conv": (1154.7, 1108.8, 211.1, 162.9),
    "mooncake": (12_035.1, 15_800.3, 342.6, 249.9),
}
"""Of the traces: mean and deviation of input and output tokens."""


@pytest.mark.parametrize("name", PROFILES)
def test_generated_lengths_and_rates_are_near_the_traces(name: Name) -> None:
    load = list(islice(generate(name, Random(1)), 20_000))
    inputs, outputs = [request.input_tokens for request in load], [request.output_tokens for request in load]
    mean_in, std_in, mean_out, std_out = FITS[name]
    assert statistics.mean(inputs) == pytest.approx(mean_in, rel=0.05)
    assert statistics.mean(outputs) == pytest.approx(mean_out, rel=0.05)
    # The extremes of the trace cut the distribution's tail.
    assert 0.8 * std_in < statistics.pstdev(inputs) < 1.05 * std_in
    assert 0.9 * std_out < statistics.pstdev(outputs) < 1.05 * std_out
    assert len(load) / load[-1].at_s == pytest.approx(PROFILES[name].rate, rel=0.12)


@pytest.mark.parametrize(("name", "of_trace"), [("azure-code", 71.6), ("azure-conv", 3.9), ("mooncake", 2.1)])
def test_generated_arrivals_are_as_bursty_as_the_traces(name: Name, of_trace: float) -> None:
    load = islice(generate(name, Random(1)), 20_000)
    assert dispersion((request.at_s for request in load), 10) == pytest.approx(of_trace, rel=0.25)


def test_a_generated_load_may_be_denser_or_calmer() -> None:
    dense = list(islice(generate("azure-code", Random(1), rate=50.0), 20_000))
    assert len(dense) / dense[-1].at_s == pytest.approx(50, rel=0.12)
    calm = islice(timed("azure-code", poisson(50.0, Random(1)), Random(1)), 20_000)
    assert dispersion((request.at_s for request in calm), 1) == pytest.approx(1, abs=0.25)


def test_generated_prompts_share_prefixes_as_mooncakes_do() -> None:
    seen: set[int] = set()
    hits = blocks = 0
    for request in islice(generate("mooncake", Random(1)), 12_000):
        assert len(request.blocks) == -(-request.input_tokens // BLOCK_TOKENS)
        known = [block in seen for block in request.blocks]
        # A prefix, and no more: what is new has not been seen.
        assert known == sorted(known, reverse=True)
        hits += sum(known)
        blocks += len(known)
        seen.update(request.blocks)
    assert hits / blocks == pytest.approx(0.366, abs=0.02)


# ---- prompts


def body(prompts: Prompts, number: int, num_tokens: int, blocks: tuple[int, ...] = ()) -> dict[str, object]:
    request = TimedRequest(at_s=0, input_tokens=num_tokens, output_tokens=7, blocks=blocks)
    found: dict[str, object] = json.loads(prompts.body(number, request))
    return found


def ids(prompts: Prompts, number: int, num_tokens: int, blocks: tuple[int, ...] = ()) -> list[int]:
    found = body(prompts, number, num_tokens, blocks)["prompt"]
    assert isinstance(found, list)
    return found


def test_a_prompt_of_ids_has_exactly_so_many_tokens() -> None:
    prompts = Prompts("completions", "m", {"temperature": 0})
    for num in (1, 2, 7, 511, 512, 513, 100_000):
        assert len(ids(prompts, 3, num)) == num
    found = body(prompts, 3, 5)
    assert (found["model"], found["max_tokens"], found["stream"], found["temperature"]) == ("m", 7, True, 0)
    assert all(1000 <= token < 2000 for token in ids(prompts, 3, 5000))


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_prompts_share_only_what_their_blocks_share(api: Api) -> None:
    prompts = Prompts(api, "m", {}, run=5)

    def units(number: int, num: int, blocks: tuple[int, ...] = ()) -> list[str]:
        return prompts.prompt(number, num, blocks).split("," if api == "completions" else " ")

    assert len(units(0, 1200, (4, 5, 6))) == 1200
    one, other = units(0, 1200, (4, 5, 6)), units(1, 1300, (4, 5, 7))
    assert one[:1024] == other[:1024]
    assert one[1024] != other[1024]
    # Without blocks the first tokens differ already, as they do from those of another run and of any block.
    firsts = {tuple(units(number, 50)[:8]) for number in range(500)} | {
        tuple(units(0, 50, (n,))[:8]) for n in range(500)
    }
    assert len(firsts) == 1000
    assert Prompts(api, "m", {}, run=6).prompt(0, 50) != prompts.prompt(0, 50)


def test_a_prompt_of_words_goes_by_what_the_endpoint_counts() -> None:
    """A tokenizer of bytes, and a template of 30: a word is five tokens, with its blank."""
    scale = Scale.through((20, 130), (120, 630))
    assert (scale.fixed, scale.per_unit) == (30, 5)
    prompts = Prompts("chat", "m", {})
    prompts.scale = scale
    found = body(prompts, 0, 530)["messages"]
    assert isinstance(found, list)
    content = found[0]["content"]
    assert len(content.split()) == 100
    assert abs(30 + len(content) - 530) <= 2
    assert len(set(WORDS)) == len(WORDS) and {len(word) for word in WORDS} == {4}
