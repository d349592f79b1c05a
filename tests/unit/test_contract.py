"""The KV contract, its salts, and digests of model files."""

from __future__ import annotations

import string
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdq.errors import Misconfigured
from pdq.kv.contract import Contract, read_key, salt, tokenizer_digest, weights_digest

CONTRACT = Contract(
    model="org/name",
    weights="w",
    tokenizer="t",
    dtype="float32",
    kv_dtype="float32",
    block_tokens=32,
    chunk_tokens=32,
    hash_algorithm="blake3",
    layout="cpu/auto",
    engine="vllm 0.32.0",
    lmcache="0.5.6",
)
TENANTS = st.text(max_size=200)


@pytest.mark.parametrize("field", Contract.__struct_fields__)
def test_every_field_counts(field: str) -> None:
    value = getattr(CONTRACT, field)
    other = msgspec.structs.replace(CONTRACT, **{field: value + (1 if isinstance(value, int) else "x")})
    assert other.fingerprint() != CONTRACT.fingerprint()


def test_equal_contracts_have_equal_fingerprints() -> None:
    assert msgspec.structs.replace(CONTRACT).fingerprint() == CONTRACT.fingerprint()


@given(TENANTS, st.text(max_size=200), st.binary(max_size=64))
def test_a_salt_is_short_hex_whatever_goes_in(tenant: str, fingerprint: str, key: bytes) -> None:
    made = salt(fingerprint, tenant, key)
    assert len(made) == 64
    assert set(made) <= set(string.hexdigits.lower())
    assert made == salt(fingerprint, tenant, key)


@given(TENANTS, TENANTS)
def test_tenants_do_not_share_a_salt(one: str, other: str) -> None:
    assert (salt("f", one, b"k") == salt("f", other, b"k")) == (one == other)


def test_fingerprint_and_tenant_do_not_run_together() -> None:
    assert salt("ab", "c", b"k") != salt("a", "bc", b"k")


def test_contract_and_key_change_the_salt(tmp_path: Path) -> None:
    keys = [tmp_path / "one", tmp_path / "two"]
    for number, path in enumerate(keys, start=1):
        path.write_bytes(bytes([number]) * 32)
    made = {salt(fingerprint, "t", read_key(key)) for fingerprint in ("f", "g") for key in ("", *map(str, keys))}
    assert len(made) == 6


def test_only_the_first_32_bytes_of_a_key_file_count(tmp_path: Path) -> None:
    short, long = tmp_path / "short", tmp_path / "long"
    short.write_bytes(bytes(range(32)))
    long.write_bytes(bytes(range(40)))
    assert read_key(str(short)) == read_key(str(long)) != bytes(range(32))


@pytest.mark.parametrize("content", [None, b"", b"x" * 31])
def test_a_bad_key_file_stops_the_process(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(Misconfigured, match="PDQ_KV_KEY_FILE"):
        read_key(str(path))


def model(directory: Path, weights: bytes = b"weights", config: str = "{}", name: str = "a.safetensors") -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(config)
    (directory / name).write_bytes(weights)
    return directory


def test_weights_digest_sees_what_it_says(tmp_path: Path) -> None:
    big = bytes(3 << 20)
    digests = [
        weights_digest(model(tmp_path / "one", big)),
        weights_digest(model(tmp_path / "config", big, config='{"a": 1}')),
        weights_digest(model(tmp_path / "name", big, name="b.safetensors")),
        weights_digest(model(tmp_path / "size", big + b"\0")),
        weights_digest(model(tmp_path / "head", b"\1" + big[1:])),
        weights_digest(model(tmp_path / "tail", big[1:] + b"\1")),
    ]
    assert len(set(digests)) == len(digests)
    assert weights_digest(model(tmp_path / "copy", big)) == digests[0]


def test_weights_digest_does_not_read_the_middle_of_a_file(tmp_path: Path) -> None:
    big = bytes(3 << 20)
    changed = big[: 3 << 19] + b"\1" + big[(3 << 19) + 1 :]
    assert weights_digest(model(tmp_path / "one", big)) == weights_digest(model(tmp_path / "two", changed))


def test_a_directory_without_weights_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Misconfigured, match=str(tmp_path)):
        weights_digest(tmp_path)


def test_tokenizer_digest_follows_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    before = tokenizer_digest(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    assert tokenizer_digest(tmp_path) != before
