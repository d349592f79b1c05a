"""How an engine shares the tokens of one step among prompts (chunked prefill)."""

from __future__ import annotations


def most_of_one_prompt(step_tokens: int) -> int:
    """The most tokens of a step that one prompt takes while other requests run or wait.

    Engines serve prompts in the order of their arrival. Half a step each means that a short prompt gets its first
    token in the next step, not after the last one of a long prompt before it; that prompt takes longer only while
    somebody waits.
    """
    return max(1, step_tokens // 2)
