"""The `bytes` tokenizer: the vocabulary of models that have no weights. The router encodes with it, the sim decodes.

Ids 0..255 are bytes, and text is encoded as its UTF-8 bytes: a prompt has as many tokens as bytes. Ids from
256 up are words, made from their number; some end inside a multi-byte character, so that the next tokens
complete it. Byte 255, which valid UTF-8 never holds, is the end token where a model names no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from pdq.errors import Misconfigured, Rejected

NUM_BYTES = 256
END = 255

_SYLLABLES = tuple(consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou")
_ENDINGS = {3: ",", 19: ".", 40: "!", 51: ".\n", 60: " 你好", 61: " ça va", 62: " 🌍"}
_OPEN = {7: b"\xc3", 21: b"\xe4\xb8", 28: b"\xe5", 35: b"\xf0\x9f\x98", 49: b"\xf0\x9f"}
"""By word number modulo 64: the first bytes of a character that takes one or two more byte tokens."""


@lru_cache(maxsize=1 << 16)
def word(number: int) -> bytes:
    """The bytes of word `number` (its id less 256): a space and at least two syllables, then its ending."""
    text, rest = "", number
    while rest or len(text) < 4:
        rest, digit = divmod(rest, len(_SYLLABLES))
        text += _SYLLABLES[digit]
    kind = number % 64
    if kind in _OPEN:
        return f" {text} ".encode() + _OPEN[kind]
    return f" {text}{_ENDINGS.get(kind, '')}".encode()


class BytesTokenizer:
    """Text to ids and back, for a vocabulary of `vocab_size` ids. Deterministic and stateless.

    `eos_token_ids` are the ids that end an answer and have no text; empty: `END`.
    Raises Misconfigured when the vocabulary does not hold all bytes, or not an end token.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
        if vocab_size < NUM_BYTES:
            raise Misconfigured(f"the bytes tokenizer needs a vocab_size of at least {NUM_BYTES}, not {vocab_size}")
        self.vocab_size = vocab_size
        self.eos_token_ids: tuple[int, ...] = tuple(eos_token_ids) or (END,)
        if bad := [token for token in self.eos_token_ids if not 0 <= token < vocab_size]:
            raise Misconfigured(f"eos_token_ids {bad} lie outside a vocab_size of {vocab_size}")

    def encode(self, text: str) -> list[int]:
        """One id per UTF-8 byte. Raises Rejected for text that has no UTF-8 form (a lone surrogate)."""
        try:
            return list(text.encode("utf-8"))
        except UnicodeEncodeError as exc:
            raise Rejected(f"text is not valid Unicode at character {exc.start}", code="invalid_text") from exc

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id in 0..vocab_size-1; none for an end token."""
        if token in self.eos_token_ids:
            return b""
        return bytes((token,)) if token < NUM_BYTES else word(token - NUM_BYTES)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; what is not valid UTF-8 becomes U+FFFD, end tokens leave no trace."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def chat(self, messages: Iterable[Mapping[str, str]]) -> str:
        """The prompt of a chat: each message as `<|role|>`, its content, a line end; then the assistant's turn.

        Messages hold `role` and `content`, both text, already validated.
        """
        turns = [f"<|{message['role']}|>\n{message['content']}\n" for message in messages]
        return "".join(turns) + "<|assistant|>\n"
