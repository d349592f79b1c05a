"""Keys and whose they are, without a broker."""

from __future__ import annotations

import base64
import re

import msgspec
import pytest
from pdq import subjects
from pdq.bus import Stored
from pdq.cli import exits, main
from pdq.errors import Misconfigured, NotDecodable, Unauthorized
from pdq.messages import decode_json, encode_json
from pdq.settings import AuthMode
from pdq.tenants import Access, Directory, KeyRecord, Limits, TenantRecord
from pdq.tenants.records import LONGEST_KEY_CHARS, PREFIX_CHARS, digest_of, new_key
from pdq.tenants.store import record_of

TENANT = TenantRecord(tenant="acme", created=1.0, generation=2)
KEY = KeyRecord(tenant="acme", prefix="pdq_abcdefgh", created=2.0, generation=2)


def test_a_key_is_random_and_fits_a_header() -> None:
    keys = {new_key() for _ in range(1_000)}
    assert len(keys) == 1_000
    for key in keys:
        assert re.fullmatch(r"pdq_[A-Za-z0-9_-]{43}", key) and len(key) <= LONGEST_KEY_CHARS
    assert len(base64.urlsafe_b64decode(new_key().removeprefix("pdq_") + "=")) == 32


def test_the_name_of_a_keys_record_is_no_key() -> None:
    key = new_key()
    assert re.fullmatch(r"[0-9a-f]{64}", digest_of(key)) and digest_of(key) != digest_of(new_key())
    assert key[4:] not in subjects.key_record(digest_of(key)) + encode_json(KEY).decode()


@pytest.mark.parametrize("text", ["", "é", "\ud800", "\x00", "pdq_" + "x" * 10_000])
def test_any_text_has_a_digest(text: str) -> None:
    assert len(digest_of(text)) == 64


def test_a_key_is_valid_in_its_generation_until_it_is_revoked() -> None:
    assert KEY.valid(TENANT)
    assert not msgspec.structs.replace(KEY, revoked=3.0).valid(TENANT)
    assert not KEY.valid(msgspec.structs.replace(TENANT, generation=3))
    assert not msgspec.structs.replace(KEY, generation=3).valid(TENANT)
    assert not KEY.valid(None)


def test_limits_that_cannot_be_are_refused() -> None:
    for wrong in (b'{"requests_in_flight":-1}', b'{"requests_in_flight":true}', b'{"requests_in_flight":"3"}'):
        with pytest.raises(NotDecodable):
            decode_json(wrong, Limits)
    assert decode_json(b'{"requests_in_flight":3}', Limits).set() == {"requests_in_flight": 3}


def stored(subject: str, data: bytes, **headers: str) -> Stored:
    return Stored(subject, 1, data, headers)


def test_what_cannot_be_read_or_was_deleted_is_no_record() -> None:
    where = subjects.tenant_record("acme")
    assert record_of(stored(where, encode_json(TENANT))) == TENANT
    assert record_of(stored(subjects.key_record("ab"), encode_json(KEY))) == KEY
    assert record_of(stored(where, b"{}")) is None
    assert record_of(stored(where, b'{"v":99,"tenant":"acme","created":1}')) is None
    assert record_of(stored(where, encode_json(TENANT), **{"KV-Operation": "DEL"})) is None
    assert record_of(stored("$KV.PDQ_TENANTS.other.x", encode_json(TENANT))) is None


# ---- access


class Known(Directory):
    """A directory of given records."""

    def __init__(self, *records: TenantRecord) -> None:
        super().__init__(bus=None)  # type: ignore[arg-type]
        self._take([stored(subjects.tenant_record(one.tenant), encode_json(one)) for one in records], {})

    def give(self, key: str, record: KeyRecord) -> None:
        self._records[subjects.key_record(digest_of(key))] = record


def access(mode: AuthMode, host: str, *records: TenantRecord) -> tuple[Access, Known]:
    directory = Known(*records)
    return Access(directory, mode, host=host, local="local"), directory


@pytest.mark.parametrize(
    ("mode", "host", "some", "needed"),
    [
        ("local", "0.0.0.0", False, False),
        ("local", "0.0.0.0", True, True),
        ("auto", "127.0.0.1", False, False),
        ("auto", "::1", False, False),
        ("auto", "localhost", False, False),
        ("auto", "127.0.0.1", True, True),
        ("auto", "0.0.0.0", True, True),
        ("auto", "::", True, True),
        ("auto", "10.0.0.1", False, True),
        ("auto", "gateway.example", False, True),
        ("keys", "127.0.0.1", False, True),
        ("none", "0.0.0.0", True, False),
    ],
)
def test_who_needs_a_key(mode: AuthMode, host: str, some: bool, needed: bool) -> None:
    door, _ = access(mode, host, *([TENANT] if some else []))
    assert door.needs_key is needed
    if not needed:
        assert door.tenant_of(None) == door.tenant_of("Bearer EMPTY") == "local"
    else:
        with pytest.raises(Unauthorized):
            door.tenant_of("Bearer EMPTY")


@pytest.mark.parametrize(
    ("mode", "host"), [("auto", "127.0.0.1"), ("local", "0.0.0.0"), ("keys", "0.0.0.0"), ("none", "0.0.0.0")]
)
def test_a_gateway_without_keys_starts_on_loopback_or_when_told_so(mode: AuthMode, host: str) -> None:
    access(mode, host)[0].check_start()


def test_a_gateway_that_others_reach_does_not_start_without_keys() -> None:
    for host in ("0.0.0.0", "::", "10.1.2.3", "gateway.example"):
        with pytest.raises(Misconfigured, match=r"pdq tenant add NAME.* PDQ_GATEWAY_AUTH"):
            access("auto", host)[0].check_start()
        access("auto", host, TENANT)[0].check_start()


def test_keys_stay_needed_when_the_bucket_is_lost() -> None:
    door, directory = access("auto", "127.0.0.1", TENANT)
    directory._take([], {})
    assert directory.names == frozenset() and door.needs_key


def test_a_key_opens_its_own_tenants_door() -> None:
    door, directory = access("keys", "0.0.0.0", TENANT, msgspec.structs.replace(TENANT, tenant="other"))
    directory.give("pdq_one", KEY)
    directory.give("pdq_two", msgspec.structs.replace(KEY, tenant="other"))
    assert door.tenant_of("Bearer pdq_one") == door.tenant_of("bearer  pdq_one ") == "acme"
    assert door.tenant_of("Bearer pdq_two") == "other"


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "pdq_secret",
        "Basic pdq_secret",
        "Bearer pdq_secret",
        "Bearer pdq_secret x",
        "Bearer pdq_secretgone",
        "Bearer \ud800pdq_secret",
        "Bearer " + "pdq_secret" * 100,
    ],
)
def test_an_error_never_quotes_what_was_sent(header: str | None) -> None:
    door, directory = access("keys", "0.0.0.0", TENANT)
    directory.give("pdq_secretgone", msgspec.structs.replace(KEY, revoked=1.0))
    directory.give("pdq_secret" * 100, KEY)
    with pytest.raises(Unauthorized) as refused:
        door.tenant_of(header)
    assert refused.value.code == "invalid_api_key"
    assert "pdq_secret" not in str(refused.value) and refused.value.__cause__ is None


def test_others_are_those_with_another_name() -> None:
    _, directory = access("keys", "0.0.0.0", TENANT)
    assert not directory.others("acme") and directory.others("someone")
    assert directory.limits("someone") == Limits()


def test_a_prefix_is_little_of_a_key() -> None:
    assert PREFIX_CHARS < len(new_key()) / 3


# ---- the command line


@pytest.mark.parametrize("command", ["add", "list", "show", "limit", "revoke"])
def test_help_teaches_by_example(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["tenant", command, "--help"]) == exits.OK
    shown = capfd.readouterr().out
    assert "Example" in shown and f"pdq tenant {command}" in shown


@pytest.mark.parametrize(
    "arguments", [["add"], ["add", "a", "--requests-per-minute", "-1"], ["limit", "a", "--tokens-in-flight", "many"]]
)
def test_a_wrong_command_line_is_one_line(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["tenant", *arguments]) == exits.USAGE
    shown = capfd.readouterr().err
    assert shown.startswith("pdq: usage: ") and shown.count("\n") == 1
