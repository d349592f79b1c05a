"""The prompts that `pdq verify` asks: chat, code, data, many scripts, and some longer than several chunks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from typing import NamedTuple


class Prompt(NamedTuple):
    """`name` is all that a log or a report shows of it."""

    name: str
    text: str
    raw: bool = False
    """Completed as it is, without a chat template."""


def log_book(days: int) -> str:
    """About 30 tokens a day, no two alike."""
    winds = ("north", "north-east", "east", "south-east", "south", "south-west", "west", "north-west")
    entries = (
        f"Day {day}: wind from the {winds[day * 3 % 8]}, {day * 7 % 41 + 3} knots, "
        f"{day * 5 % 13} ships passed, the lamp burned {day * 11 % 29 + 2} litres of oil."
        for day in range(1, days + 1)
    )
    return "\n".join(entries)


CODE = 'def fibonacci(n: int) -> int:\n    """The n-th number of the Fibonacci sequence, counted from zero."""\n'

PROMPTS = (
    Prompt("capital", "What is the capital of France, and which river runs through it? Answer in one sentence."),
    Prompt("code", f"{CODE}    if n < 2:\n        return n\n    return", raw=True),
    Prompt("summary", f"Summarise this log book in one sentence.\n\n{log_book(9)}"),
    Prompt("scripts", "Übermut 🎉🚀 你好世界, こんにちは, Привет мир, مرحبا بالعالم, naïve café, ½ € ∑ — ", raw=True),
    Prompt("json", '{"name": "Ada Lovelace", "born": 1815, "tags": ["mathematics", "engines"], "died":', raw=True),
    Prompt("long log", log_book(38) + "\nDay 39: wind from the", raw=True),
    Prompt("list", "List the first ten prime numbers, separated by commas."),
    Prompt("counting", " ".join(map(str, range(1, 120))), raw=True),
    Prompt("translate", "Translate 'Good morning, how did you sleep?' into Spanish, French and German."),
    Prompt("long question", f"{log_book(24)}\n\nOn which of these days did the most ships pass? Explain briefly."),
)


def make(num: int, tag: str) -> list[Prompt]:
    """`num` prompts that differ from those of every other `tag` from the start, so that their KV is not there yet."""
    return list(islice(_all(tag), num))


def _all(tag: str) -> Iterator[Prompt]:
    for turn in count(1):
        for prompt in PROMPTS:
            name = prompt.name if turn == 1 else f"{prompt.name} {turn}"
            yield Prompt(name, f"({tag}{turn}) {prompt.text}", prompt.raw)
