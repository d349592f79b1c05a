"""How long a simulated step takes. Published models, in milliseconds.

A prompt of n tokens costs `a + b·n + c·n²`; a decode step costs `a + b·batch + c·kv_tokens` (the form of
DistServe's simulator). Profiles are least-squares fits (mean absolute error 1.7–16 %) to:

- `llama2-70b-*`, `bloom-176b-*`: Mutinifni/splitwise-sim @8f99e7dc, its measured `perf_model.csv`
- `opt-*`: LLMServe/DistServe @82831f16, `simdistserve/estimators`, DistServe's own coefficients
- `llama3-8b-h100`: not measured; inferred from the model's FLOP and bytes at an H100's rates
- `instant`: takes no time, for tests of everything but time
"""

from __future__ import annotations

from typing import NamedTuple

from pdq.errors import Misconfigured


class Profile(NamedTuple):
    """Coefficients (a, b, c) of a prompt and of a decode step, milliseconds."""

    prefill: tuple[float, float, float]
    decode: tuple[float, float, float]

    def prefill_ms(self, start: int, count: int) -> float:
        """The share of prompt tokens `start`..`start + count`, without `a`: chunks of a prompt add up to it whole."""
        _, per_token, per_square = self.prefill
        return per_token * count + per_square * ((start + count) ** 2 - start**2)

    def decode_ms(self, batch: int, kv_tokens: int) -> float:
        """One step that gives `batch` requests a token each, over `kv_tokens` tokens of context in all."""
        base, per_request, per_token = self.decode
        return base + per_request * batch + per_token * kv_tokens

    def scaled(self, factor: float) -> Profile:
        pa, pb, pc = self.prefill
        da, db, dc = self.decode
        return Profile((pa * factor, pb * factor, pc * factor), (da * factor, db * factor, dc * factor))


PROFILES: dict[str, Profile] = {
    "instant": Profile((0.0, 0.0, 0.0), (0.0, 0.0, 0.0)),
    "llama2-70b-h100-tp8": Profile((22.7, 0.0649, 3.5e-6), (29.8, 0.202, 1.78e-4)),
    "llama2-70b-h100-tp4": Profile((19.0, 0.0885, 3.0e-6), (28.9, 0.272, 7.9e-5)),
    "llama2-70b-a100-tp8": Profile((21.5, 0.150, 2.0e-6), (44.2, 0.200, 3.1e-4)),
    "bloom-176b-h100-tp8": Profile((17.3, 0.119, 7.6e-6), (35.6, 0.308, 1.57e-4)),
    "opt-13b-a100-tp1": Profile((18.1, 0.102, 7.1e-6), (19.9, 0.0385, 6.3e-4)),
    "opt-66b-a100-tp4": Profile((29.4, 0.151, 8.3e-6), (30.8, 0.063, 4.5e-4)),
    "llama3-8b-h100": Profile((8.0, 0.0325, 5.3e-7), (6.0, 0.02, 4.4e-5)),
}


def parse(text: str) -> Profile:
    """A profile's name, with an optional factor on all its times: `llama2-70b-h100-tp8*0.1`.

    Raises Misconfigured for an unknown name or a factor that is not a number above 0.
    """
    name, star, factor = text.replace("×", "*").partition("*")
    profile = PROFILES.get(name.strip())
    if profile is None:
        raise Misconfigured(f"PDQ_ENGINE_SIM_PROFILE is {text!r}: the profiles are {', '.join(PROFILES)}")
    if not star:
        return profile
    try:
        scale = float(factor)
    except ValueError:
        scale = 0.0
    if not 0.0 < scale < float("inf"):
        raise Misconfigured(f"PDQ_ENGINE_SIM_PROFILE is {text!r}: the factor must be a number above 0")
    return profile.scaled(scale)
