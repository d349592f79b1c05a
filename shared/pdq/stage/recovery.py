"""Where a second decode attempt begins: it goes on after what was shown, or runs again from the start.

`continue`: prompt and shown tokens become the new prompt. Cheap, and right whenever the next token depends
on nothing but the tokens so far.
`replay`: where the request carries state over its output, the answer is computed again with the same seed
and compared with what was shown before more is published; a difference ends it as `diverged`.
"""

from __future__ import annotations

from pdq.log import Transcript
from pdq.messages import Sampling


def carries_state(sampling: Sampling) -> bool:
    """Whether tokens already made change the choice of the next ones other than by being its context.

    A repetition penalty is against all of the context, prompt or answer, so it does not.
    """
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.min_tokens
        or sampling.stop
        or sampling.guide
        or (sampling.tools is not None and sampling.tools.guided)
        or (sampling.seeded and sampling.temperature > 0)
    )


def begin(sampling: Sampling, shown: Transcript) -> tuple[int, int]:
    """(tokens, characters) of what was shown that the attempt goes on after; (0, 0) replays it all.

    It goes on where no text was held back: what was shown beyond is computed again, and compared.
    """
    return (0, 0) if carries_state(sampling) else shown.clean
