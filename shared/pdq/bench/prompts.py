"""Prompts of the lengths that a load asks for, made of what is one token each.

For completions a prompt is token ids, so it has exactly so many tokens. For chat it is common English words of four
letters, of which nearly every vocabulary has one token each; what a word and the chat template really are is measured
on the endpoint (`Scale`). Ids and words take the same number of bytes, so that a prompt is cut out of a pool.
"""

from __future__ import annotations

import secrets
from random import Random
from typing import Any

import msgspec

from pdq.bench.target import Api
from pdq.bench.workload import BLOCK_TOKENS, TimedRequest

UNIT_BYTES = 5
POOL_UNITS = 1 << 16
SPREAD = 2_654_435_761
"""Odd, so that neighbours begin at places of the pool that are far from each other."""
NAME_UNITS = 4
"""That a prompt, or a block, has its number in; as many again have the run's."""
FIRST_ID, NUM_IDS = 1000, 1000
"""Ordinary tokens of any vocabulary: special ones lie before or far behind."""
WORDS = (
    "able also area away back ball band bank base bear beat best bill bird blue boat body book both call camp card "
    "care case cash cast city club coal coat cold come cook cost dark data date days deal deep door down draw drop "
    "each east edge even ever face fact fall farm fast feel feet file film find fire firm fish five flat food foot "
    "form four free from full fund game gave girl give goal gold good gray grew grow half hall hand hard have head "
    "hear heat held help here high hill hold home hope hour idea into iron join jump just keep kept kind king knew "
    "know lack lady lake land last late lead left less life lift like line list live long look lost love made mail "
    "main make many mark mass meet mile milk mind mine moon more most move much must name near need news next nine "
    "none note once only open over page paid pain park part pass past path pick plan play pool poor port pull push "
    "race rain read real rest rich ride ring rise road rock role roof room rule safe said salt same sand save seem "
    "sell send ship shop show side sign site size skin snow soft soil sold some song soon sort spot star stay step "
    "stop such sure take talk tall team tell term test than that them then they thin this time tiny told took town "
    "tree trip true turn type unit upon very view vote wait walk wall want warm wash wave week well went were west "
    "what when whom wide wife wild will wind wine wing wish with wood word work yard year your zero"
).split()


class Scale(msgspec.Struct, frozen=True):
    """Tokens of a prompt: `fixed` (the chat template's) and `per_unit` for each word."""

    fixed: float = 0.0
    per_unit: float = 1.0

    @classmethod
    def through(cls, first: tuple[int, int], second: tuple[int, int]) -> Scale:
        """By two prompts, each as its number of words and of tokens."""
        per_unit = max(1.0, (second[1] - first[1]) / (second[0] - first[0]))
        return cls(max(0.0, first[1] - per_unit * first[0]), per_unit)

    def units(self, num_tokens: int) -> int:
        return max(1, round((num_tokens - self.fixed) / self.per_unit))


class Prompts:
    """Bodies of a load's requests.

    Prompts of different `run`s have nothing in common, so that no cache of an earlier run helps this one; within a run
    the same block id is the same text, and a request without blocks shares nothing.
    """

    def __init__(self, api: Api, model: str, options: dict[str, Any], scale: Scale | None = None, run: int = 0) -> None:
        """`options`: further fields of each body."""
        self.scale = scale or Scale()
        self._api = api
        self._ids = api == "completions"
        self._units = [f"{FIRST_ID + n}," for n in range(NUM_IDS)] if self._ids else [f"{word} " for word in WORDS]
        self._run = run or secrets.randbits(24)
        pool = Random(self._run)
        self._pool = "".join(pool.choices(self._units, k=POOL_UNITS))
        fields = {"model": model, **options, "stream": True, "stream_options": {"include_usage": True}}
        self._fields = msgspec.json.encode(fields)[1:].decode()

    def body(self, number: int, request: TimedRequest) -> bytes:
        """Of the load's request `number`."""
        prompt = self.prompt(number, request.input_tokens, request.blocks)
        return self._wrapped(prompt, request.output_tokens)

    def _wrapped(self, prompt: str, output_tokens: int) -> bytes:
        if self._ids:
            return f'{{"prompt":[{prompt}],"max_tokens":{output_tokens},{self._fields}'.encode()
        message = f'{{"role":"user","content":"{prompt}"}}'
        return f'{{"messages":[{message}],"max_tokens":{output_tokens},{self._fields}'.encode()

    def prompt(self, number: int, num_tokens: int, blocks: tuple[int, ...] = ()) -> str:
        """Ids with commas between them, or words with blanks."""
        wanted = self.scale.units(num_tokens)
        if not blocks:
            return self._text(0, number, wanted)
        per_block = max(1, round(BLOCK_TOKENS / self.scale.per_unit))
        parts, left = [], wanted
        for block in blocks:
            parts.append(self._cut(1, block, min(left, per_block)))
            left -= min(left, per_block)
        return "".join(parts)[:-1] if not left else "".join(parts) + self._text(0, number, left)

    def _text(self, kind: int, number: int, num_units: int) -> str:
        return self._cut(kind, number, num_units)[:-1]

    def _cut(self, kind: int, number: int, num_units: int) -> str:
        """So many units that begin with what `kind`, `number` and the run are: no two begin alike."""
        name = "".join(self._units[digit] for digit in self._digits(kind, number))
        length = UNIT_BYTES * num_units
        start = UNIT_BYTES * (number * SPREAD % POOL_UNITS)
        text = name + self._pool[start : start + length]
        while len(text) < length:
            text += self._pool[: length - len(text)]
        return text[:length]

    def _digits(self, kind: int, number: int) -> list[int]:
        return [*self._in_base(2 * number + kind), *self._in_base(self._run)]

    def _in_base(self, number: int) -> list[int]:
        """Its digits, the smallest first: so the very first units differ already."""
        base = len(self._units)
        return [number // base**place % base for place in range(NAME_UNITS)]
