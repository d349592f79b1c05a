"""KV at rest: a frame opens under the name and key it was sealed with, and under no other."""

from __future__ import annotations

import hashlib
import hmac
import stat
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st
from pdq.errors import Misconfigured
from pdq.kv import keys
from pdq.kv.contract import read_key
from pdq.kv.seal import HEADER_BYTES, OVERHEAD_BYTES, TAG_BYTES, Name, Seal, Unauthentic, derive
from pdq.kv.serde import spec

SECRET = bytes(range(32))
NAME = Name("org/name", 0x01000100, 0, bytes(32), "5a" * 32)
PLAIN = bytes(number % 251 for number in range(1000))
OTHERS = {
    "model_name": "org/other",
    "kv_rank": 0x02010201,
    "object_group_id": 1,
    "chunk_hash": bytes(31) + b"\1",
    "cache_salt": "5b" * 32,
}
NAMES = st.builds(
    Name,
    st.text(max_size=20),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=40),
    st.text(max_size=20),
)


def sealed(plain: bytes = PLAIN, name: Name = NAME, secret: bytes = SECRET) -> bytearray:
    frame = bytearray(len(plain) + OVERHEAD_BYTES)
    assert Seal(secret).seal(memoryview(plain), memoryview(frame), name) == len(frame)
    return frame


def opened(frame: bytes | bytearray, length: int = len(PLAIN), name: Name = NAME, secret: bytes = SECRET) -> bytes:
    plain = bytearray(length)
    Seal(secret).open(memoryview(frame), memoryview(plain), name)
    return bytes(plain)


def refused(frame: bytes | bytearray, name: Name = NAME, secret: bytes = SECRET) -> str:
    """The cause; and nothing of it was written."""
    untouched = b"\xee" * len(PLAIN)
    into = bytearray(untouched)
    with pytest.raises(Unauthentic) as caught:
        Seal(secret).open(memoryview(frame), memoryview(into), name)
    assert into == untouched
    return caught.value.cause


@given(st.binary(max_size=2000), NAMES, st.binary(min_size=32, max_size=32), st.integers(0, 64))
def test_what_was_sealed_opens_whatever_follows_it(plain: bytes, name: Name, secret: bytes, padding: int) -> None:
    assert opened(sealed(plain, name, secret) + bytes(padding), len(plain), name, secret) == plain


def test_the_format_is_pinned() -> None:
    """Derived and decrypted by other means, so that no later version reads or writes another format by accident."""
    salt = NAME.cache_salt.encode()
    extracted = hmac.new(bytes(32), SECRET, hashlib.sha256).digest()
    key = hmac.new(extracted, b"pdq kv at rest v1\0" + salt + b"\1", hashlib.sha256).digest()
    frame = bytes(sealed())
    assert frame[:4] == b"PDQ\1"
    cipher = Cipher(algorithms.AES256(key), modes.GCM(frame[4:16], frame[-16:])).decryptor()
    cipher.authenticate_additional_data(
        b"PDQ\1"
        + (b"\0\0\0\x08" + b"org/name")
        + (b"\0\0\0\x10" + b"\0\0\0\0\1\0\1\0" + bytes(8))
        + (b"\0\0\0\x20" + bytes(32))
        + (b"\0\0\0\x40" + salt)
    )
    assert cipher.update(frame[16:-16]) + cipher.finalize() == PLAIN


def test_a_frame_of_this_version_still_opens() -> None:
    """Stored on disk by an earlier run of this code."""
    frame = "50445101000102030405060708090a0badcf796c2ace0f820495013f8a167b55b48ed251039b"
    assert opened(bytes.fromhex(frame), 6) == b"stored"


@pytest.mark.parametrize(
    ("part", "place", "cause"),
    [
        ("magic", 0, "malformed"),
        ("version", 3, "version"),
        ("nonce's first byte", 4, "tag"),
        ("nonce's last byte", HEADER_BYTES - 1, "tag"),
        ("body's first byte", HEADER_BYTES, "tag"),
        ("body's middle", HEADER_BYTES + len(PLAIN) // 2, "tag"),
        ("body's last byte", -TAG_BYTES - 1, "tag"),
        ("tag's first byte", -TAG_BYTES, "tag"),
        ("tag's last byte", -1, "tag"),
    ],
)
@pytest.mark.parametrize("bit", range(8))
def test_one_flipped_bit_is_refused(part: str, place: int, cause: str, bit: int) -> None:
    frame = sealed()
    frame[place] ^= 1 << bit
    assert refused(frame) == cause, part


@given(st.integers(0, 8 * (len(PLAIN) + OVERHEAD_BYTES) - 1))
def test_any_flipped_bit_is_refused(bit: int) -> None:
    frame = sealed()
    frame[bit // 8] ^= 1 << bit % 8
    refused(frame)


@pytest.mark.parametrize("length", [0, 1, 3, 4, HEADER_BYTES, OVERHEAD_BYTES, len(PLAIN) + OVERHEAD_BYTES - 1])
def test_a_truncated_frame_is_refused(length: int) -> None:
    assert refused(sealed()[:length]) == "malformed"


def test_a_frame_of_another_length_is_refused() -> None:
    longer, shorter = sealed(PLAIN + b"x"), sealed(PLAIN[:-1])
    assert refused(longer) == "tag"
    assert refused(shorter + b"\0") == "tag"


@pytest.mark.parametrize("field", Name._fields)
def test_a_frame_under_another_name_is_refused(field: str) -> None:
    other = NAME._replace(**{field: OTHERS[field]})
    assert refused(sealed(name=other)) == "tag"
    assert opened(sealed(name=other), name=other) == PLAIN


@given(NAMES, NAMES)
def test_names_that_differ_are_bound_differently(one: Name, other: Name) -> None:
    assert (one.associated() == other.associated()) == (one == other)


def test_fields_of_a_name_do_not_run_together() -> None:
    assert NAME._replace(model_name="ab", cache_salt="c").associated() != (
        NAME._replace(model_name="a", cache_salt="bc").associated()
    )


def test_another_key_file_opens_nothing() -> None:
    assert refused(sealed(), secret=bytes(32)) == "tag"


def test_a_salt_has_a_key_of_its_own_that_is_not_the_tenants_hash_key(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(SECRET)
    made = {derive(SECRET, ""), derive(SECRET, "a"), derive(SECRET, "b"), read_key(str(path)), SECRET}
    assert len(made) == 5
    assert {len(key) for key in made} == {32}


def test_the_same_chunk_is_never_sealed_the_same_way_twice() -> None:
    assert len({bytes(sealed()[4:HEADER_BYTES]) for _ in range(100)}) == 100


def test_a_frame_that_has_no_room_is_an_error() -> None:
    with pytest.raises(ValueError, match="1032 bytes does not fit into 1031"):
        Seal(SECRET).seal(memoryview(PLAIN), memoryview(bytearray(len(PLAIN) + OVERHEAD_BYTES - 1)), NAME)


def test_a_key_file_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "secrets" / "kv.key"
    assert keys.ensure(path) == path
    made = path.read_bytes()
    assert (len(made), stat.S_IMODE(path.stat().st_mode)) == (32, 0o600)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == ["kv.key"]
    keys.ensure(path)
    assert path.read_bytes() == made == keys.read(path)


def test_those_who_make_it_at_one_time_get_one_key(tmp_path: Path) -> None:
    path = tmp_path / "key"
    seen: list[bytes] = []
    start = threading.Barrier(16)

    def make() -> None:
        start.wait(10)
        seen.append(keys.read(keys.ensure(path)))

    threads = [threading.Thread(target=make) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(seen) == 16
    assert len(set(seen)) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_key_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = keys.ensure(tmp_path / "key")
    path.chmod(mode)
    with pytest.raises(Misconfigured, match=f"{path}.*{mode:03o}"):
        keys.ensure(path)


def test_a_short_key_file_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_bytes(b"short")
    with pytest.raises(Misconfigured, match="5 bytes"):
        keys.ensure(path)
    assert path.read_bytes() == b"short"


def test_a_key_file_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(Misconfigured, match="cannot be made"):
        keys.ensure(tmp_path / "file" / "key")


def test_the_serde_is_named_with_its_key_file() -> None:
    assert spec("/k") == {"type": "pdq", "key_file": "/k"}
