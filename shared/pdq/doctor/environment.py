"""Settings and variables of this shell that are wrong, unread, or change what engines do; and the KV key file."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from pdq import settings
from pdq.doctor.facts import Facts
from pdq.doctor.finding import Finding, fail, ok, warn
from pdq.engines.vllm_config import HASH_SEED
from pdq.kv.keys import KEY_BYTES, OTHERS

NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
SEED = "PYTHONHASHSEED"


def variables(facts: Facts) -> Iterator[Finding]:
    """`PDQ_*` that nothing reads, and values that cannot be."""
    known = settings.known_variables()
    unknown = settings.unknown_variables(facts.environ)
    for name in unknown:
        meant = difflib.get_close_matches(name, known, 1)
        yield fail(
            "environment.variable",
            f"{name} is set, and no setting has that name",
            subject=name,
            value="unknown",
            trap="a typing error is not a setting: every command and service of pdq refuses to start with it",
            cure=f"unset {name}" + (f", or did you mean {meant[0]}?" if meant else ""),
        )
    for error in facts.setting_errors:
        yield fail(
            "environment.variable",
            error,
            subject=error.partition(" ")[0],
            trap="a service that reads this setting does not start",
            cure="set it to a value of its kind, or unset it",
        )
    if not unknown and not facts.setting_errors:
        count = sum(name.startswith("PDQ_") for name in facts.environ)
        yield ok("environment.variable", f"{count} PDQ_* variables are set, all of them known", value=count)


def bytecode(facts: Facts) -> Iterator[Finding]:
    if facts.environ.get(NO_BYTECODE):
        yield warn(
            "environment.bytecode",
            f"{NO_BYTECODE} is set",
            subject=NO_BYTECODE,
            value=facts.environ[NO_BYTECODE],
            limit="unset",
            trap="Python compiles vLLM anew at every start: twice as long until a worker is ready",
            cure=f"unset {NO_BYTECODE} (`pdq up` leaves it out by itself)",
        )


def hash_seed(facts: Facts) -> Iterator[Finding]:
    seed = facts.environ.get(SEED, HASH_SEED)
    if seed != HASH_SEED:
        yield warn(
            "environment.hash_seed",
            f"{SEED} is {seed}; pdq's engines run with {HASH_SEED}",
            subject=SEED,
            value=seed,
            limit=HASH_SEED,
            trap="what is started by hand, with a hash that has a seed, finds nothing that others stored",
            cure=f"unset {SEED}, or export {SEED}={HASH_SEED}",
        )


def key_file(facts: Facts) -> Iterator[Finding]:
    """The file that keys the tenants' salts, and the encryption of KV at rest."""
    key = facts.key_file
    if key is None:
        if any(worker.server and worker.beat.about.get("kv.key") == "none" for worker in facts.workers):
            yield warn(
                "key.file",
                "no KV key file is set",
                value="none",
                limit=f"{KEY_BYTES} bytes, mode 600",
                trap="tenants' salts are keyed with nothing secret, and KV in a lower tier is not encrypted",
                cure="PDQ_KV_KEY_FILE for every worker: `head -c 32 /dev/urandom > kv.key; chmod 600 kv.key`",
            )
        return
    if wrong := _wrong(key.exists, key.readable, key.size, key.mode):
        what, cure = wrong
        yield fail(
            "key.file",
            f"{key.path} {what}",
            subject=key.path,
            value=f"{key.size} bytes, mode {key.mode:03o}" if key.exists else "missing",
            limit=f"{KEY_BYTES} bytes, mode 600",
            trap="workers do not start, or the key is open to others: with it they read KV at rest and forge salts",
            cure=cure.format(path=key.path),
        )
    else:
        yield ok("key.file", f"{key.size} bytes, mode {key.mode:03o}", subject=key.path)


def _wrong(exists: bool, readable: bool, size: int, mode: int) -> tuple[str, str] | None:
    make = "head -c 32 /dev/urandom > {path}; chmod 600 {path}"
    if not exists:
        return "does not exist", f"{make} (the same file for every worker)"
    if not readable:
        return "cannot be read by this user", "chown it to the user of the workers; chmod 600 {path}"
    if size < KEY_BYTES:
        return f"has {size} bytes, and must have {KEY_BYTES}", make
    if mode & OTHERS:
        return f"has mode {mode:03o}: others can use it", "chmod 600 {path}"
    return None
