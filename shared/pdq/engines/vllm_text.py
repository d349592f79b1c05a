"""Between pdq's sampling and token messages and vLLM's."""

from __future__ import annotations

from typing import Any

from pdq.engines.base import Tokens
from pdq.engines.grammar import enforceable
from pdq.engines.parsing import Reading
from pdq.messages import Sampling, TokenLogprob, TopLogprob

SEED_MASK = (1 << 63) - 1


def decode_params(sampling: Sampling, reading: Reading | None) -> Any:
    """vLLM's SamplingParams for an answer in deltas. `reading`: of one that is parsed."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    guide = StructuredOutputsParams(json=enforceable(sampling.guide)) if sampling.guide else None

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed & SEED_MASK,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=list(sampling.stop) or None,
        stop_token_ids=list(sampling.stop_token_ids) or None,
        ignore_eos=sampling.ignore_eos,
        logit_bias=dict(sampling.logit_bias) or None,
        logprobs=sampling.logprobs,
        structured_outputs=reading.guide() if reading else guide,
        skip_special_tokens=reading.skip_special_tokens if reading else True,
        output_kind=RequestOutputKind.DELTA,
    )


def decode_options(reading: Reading | None) -> dict[str, Any]:
    """What vLLM's `generate` must know of an answer's reasoning: a grammar counts once that is over, or at once."""
    if reading is None:
        return {"reasoning_ended": True}
    return {"reasoning_ended": reading.reasoning_ended, "reasoning_parser_kwargs": {"chat_template_kwargs": {}}}


def guided_by(sampling: Sampling) -> str:
    """The field of a request that holds its answer to a grammar; empty: none does."""
    if sampling.tools is not None and sampling.tools.guided:
        return "tools"
    return "response_format" if sampling.guide else ""


def prefill_params() -> Any:
    """One token, which nobody sees: decode owns every output token."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)


def tokens_of(completion: Any, sampling: Sampling, tokenizer: Any) -> Tokens | None:
    """A delta of vLLM's output; None when it holds nothing."""
    ids = tuple(completion.token_ids)
    if not ids and not completion.text:
        return None
    logprobs = None
    if sampling.logprobs is not None:
        positions = zip(ids, completion.logprobs or (), strict=True)
        logprobs = tuple(_logprob(id, position, sampling.logprobs) for id, position in positions)
    return Tokens(ids=ids, text=completion.text, logprobs=logprobs, held=open_end(ids, tokenizer))


def open_end(ids: tuple[int, ...], tokenizer: Any) -> bool:
    """Whether the last of these tokens end within a character: its bytes are held back until it is complete.

    A character has at most four bytes, so four tokens tell. (A true U+FFFD counts too: that errs on the safe side.)
    """
    return bool(ids) and tokenizer.decode(list(ids[-4:])).endswith("\ufffd")


def _logprob(id: int, position: dict[int, Any], num_top: int) -> TokenLogprob:
    chosen = position[id]
    ranked = sorted(position.values(), key=lambda entry: entry.rank)[:num_top]
    top = tuple(TopLogprob(token=entry.decoded_token or "", logprob=entry.logprob) for entry in ranked)
    return TokenLogprob(token=chosen.decoded_token or "", logprob=chosen.logprob, top=top)
