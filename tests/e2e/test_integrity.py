"""Stored KV that was changed, cut, swapped or renamed is a miss, and no answer is built on it.

Prefill and decode have an LMCache server each over one directory, so that decode loads from the files alone.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio
from pdq.engines.base import Work
from pdq.kv import keys
from pdq.kv.contract import read_key, salt
from pdq.kv.seal import HEADER_BYTES, TAG_BYTES
from pdq.settings import KvServerSettings, ModelSpec
from pdq.verify.prompts import log_book
from tokenizers import Tokenizer

from tests.e2e.conftest import Answer, KvServer, Pair, answer, greedy

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),
]

CHUNK = 32
CHUNKS, MANY = 5, 20
"""Whole chunks of the prompts; each has half a chunk more."""
MAX_TOKENS = 4
SIZES = KvServerSettings(memory_gb=0.5)
TOLERANCE = 1e-3
WAIT_S = 20.0

Prompt = tuple[int, ...]


class Pool(NamedTuple):
    """The directory that both servers share, and the names of the short prompt's chunks in it, in order."""

    pair: Pair
    directory: Path
    key: bytes
    short: Prompt
    hashes: list[str]
    right: dict[Prompt, Answer]
    """Each prompt's answer, computed by decode without any KV."""

    def files(self, tenant: str) -> list[Path]:
        """Of the short prompt, in its chunks' order."""
        return [self.directory / self.name(hash, tenant) for hash in self.hashes]

    def name(self, hash: str, tenant: str) -> str:
        [found] = [path.name for path in self.all(tenant) if hash in path.name]
        return found

    def all(self, tenant: str) -> list[Path]:
        return sorted(self.directory.glob(f"*@{tenant}.data"))

    async def fill(self, prompt: Prompt, tenant: str) -> list[Path]:
        """Prefill stores the whole prompt; returns its new files, in no order."""
        before = set(self.all(tenant))
        result = await self.pair.prefill.prefill(work(prompt, tenant))
        assert result.stored_tokens == len(prompt) // CHUNK * CHUNK
        return sorted(set(self.all(tenant)) - before)

    async def check(self, prompt: Prompt, tenant: str, loaded: int) -> None:
        """Decode loads so many chunks, computes the rest, and answers right."""
        answered = await answer(self.pair.decode, work(prompt, tenant))
        right = self.right[prompt]
        assert (answered.done.loaded_tokens, answered.done.local_tokens) == (loaded * CHUNK, 0)
        assert answered.ids == right.ids
        assert answered.logprobs == pytest.approx(right.logprobs, abs=TOLERANCE)

    def refused(self) -> int:
        """Chunks that decode's server has refused since its start."""
        url = f"http://127.0.0.1:{self.pair.decode_server.kv.http_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as page:
            text = page.read().decode()
        return int(sum(map(float, re.findall(r"^pdq_kv_refused_chunks_total\{.*\} (\S+)$", text, re.M))))


def work(prompt: Prompt, tenant: str) -> Work:
    return Work(request="r", prompt=prompt, sampling=greedy(MAX_TOKENS, ignore_eos=True, logprobs=0), salt=tenant)


@pytest.fixture(scope="module")
def many(tokenizer: Tokenizer) -> Prompt:
    return cut(tokenizer, log_book(40), MANY)


@pytest.fixture(scope="module")
def other(tokenizer: Tokenizer) -> Prompt:
    """As long as the short one, and different from its first chunk on."""
    return cut(tokenizer, f"Of another ship. {log_book(12)}", CHUNKS)


def cut(tokenizer: Tokenizer, text: str, chunks: int) -> Prompt:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) > chunks * CHUNK + CHUNK // 2
    return tuple(ids[: chunks * CHUNK + CHUNK // 2])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(
    spec: ModelSpec, tokenizer: Tokenizer, many: Prompt, other: Prompt, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Pool]:
    assert spec.chunk_tokens == CHUNK
    root = tmp_path_factory.mktemp("integrity")
    directory, key = root / "pool", keys.ensure(root / "key")
    kv = {"mode": "pool", "pool": f"file://{directory}", "key_file": str(key)}
    pair = Pair(spec, *(KvServer(root / name, spec, SIZES, **kv) for name in ("prefill", "decode")))
    short = cut(tokenizer, log_book(12), CHUNKS)
    try:
        await pair.start()
        pool = Pool(pair, directory, read_key(str(key)), short, [], {})
        for prompt in (short, other, many):
            pool.right[prompt] = await answer(pair.decode, work(prompt, secrets.token_hex(32)))
        tenant = secrets.token_hex(32)
        for chunk in range(1, CHUNKS + 1):
            [path] = set(await pool.fill(short[: chunk * CHUNK], tenant))
            pool.hashes.append(path.name.split("@")[-2])
        yield pool
    finally:
        await pair.stop()


@pytest.fixture
def tenant() -> str:
    return secrets.token_hex(32)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << (place % 8)
    path.write_bytes(data)


async def test_untouched_files_load_whole_and_hold_no_plain_kv(pool: Pool, many: Prompt, tenant: str) -> None:
    files = await pool.fill(many, tenant)
    assert len(files) == MANY
    assert {path.read_bytes()[:4] for path in files} == {b"PDQ\1"}
    before = pool.refused()
    await pool.check(many, tenant, loaded=MANY)
    assert pool.refused() == before


async def test_one_flipped_bit_in_each_of_twenty_files(pool: Pool, many: Prompt, tenant: str) -> None:
    """In magic, version, nonce, KV and tag; each is refused by itself, and all are stored anew."""
    files = await pool.fill(many, tenant)
    size = files[0].stat().st_size
    ends = [0, 3, 4, HEADER_BYTES - 1, HEADER_BYTES, -TAG_BYTES - 1, -TAG_BYTES, -1]
    places = [place % size for place in ends] + [size * part // 13 for part in range(1, 13)]
    assert len(files) == len(set(places)) == MANY
    for path, place in zip(files, places, strict=True):
        flip(path, place)
    changed = [path.read_bytes() for path in files]
    before = pool.refused()
    await pool.check(many, tenant, loaded=0)
    assert pool.refused() == before + MANY
    async with asyncio.timeout(WAIT_S):
        while not (pool.all(tenant) == files and all(map(differs, files, changed))):
            await asyncio.sleep(0.05)


def differs(path: Path, data: bytes) -> bool:
    return path.stat().st_size == len(data) and path.read_bytes() != data


@pytest.mark.parametrize("chunk", [0, 2, 4])
async def test_what_comes_before_a_flipped_bit_is_loaded(pool: Pool, tenant: str, chunk: int) -> None:
    await pool.fill(pool.short, tenant)
    flip(pool.files(tenant)[chunk], 1000)
    await pool.check(pool.short, tenant, loaded=chunk)


Tamper = Callable[[list[Path], list[Path], list[Path]], None]
"""With the files of the prompt, of another prompt of the tenant, and of the prompt by another tenant."""


def swap(mine: list[Path], others: list[Path], foreign: list[Path]) -> None:
    one, two = mine[1].read_bytes(), mine[3].read_bytes()
    mine[1].write_bytes(two)
    mine[3].write_bytes(one)


def put_back_under_a_new_name(mine: list[Path], others: list[Path], foreign: list[Path]) -> None:
    mine[2].unlink()
    others[2].rename(mine[2])


def take_from_another_tenant(mine: list[Path], others: list[Path], foreign: list[Path]) -> None:
    mine[3].write_bytes(foreign[3].read_bytes())


def truncate(mine: list[Path], others: list[Path], foreign: list[Path]) -> None:
    mine[2].write_bytes(mine[2].read_bytes()[:-1])


def empty(mine: list[Path], others: list[Path], foreign: list[Path]) -> None:
    mine[1].write_bytes(b"")


def lose(mine: list[Path], others: list[Path], foreign: list[Path]) -> None:
    mine[4].unlink()


def extend(mine: list[Path], others: list[Path], foreign: list[Path]) -> None:
    """What was sealed is still there, and nothing else is read."""
    with mine[2].open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize(
    ("tamper", "loaded"),
    [
        (swap, 1),
        (put_back_under_a_new_name, 2),
        (take_from_another_tenant, 3),
        (truncate, 2),
        (empty, 1),
        (lose, 4),
        (extend, 5),
    ],
)
async def test_files_that_are_not_what_their_names_say(
    pool: Pool, other: Prompt, tenant: str, tamper: Tamper, loaded: int
) -> None:
    others = await pool.fill(other, tenant)
    await pool.fill(pool.short, tenant)
    neighbour = secrets.token_hex(32)
    if tamper is take_from_another_tenant:
        await pool.fill(pool.short, neighbour)
    foreign = pool.files(neighbour) if tamper is take_from_another_tenant else []
    tamper(pool.files(tenant), others, foreign)
    await pool.check(pool.short, tenant, loaded=loaded)


async def test_tenants_and_contracts_find_nothing_of_each_other(pool: Pool) -> None:
    ours = salt("contract", "ours", pool.key)
    await pool.fill(pool.short, ours)
    await pool.check(pool.short, salt("contract", "theirs", pool.key), loaded=0)
    await pool.check(pool.short, salt("another contract", "ours", pool.key), loaded=0)
    await pool.check(pool.short, salt("contract", "ours", read_key("")), loaded=0)
    await pool.check(pool.short, ours, loaded=CHUNKS)
