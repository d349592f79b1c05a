"""A Llama GGUF file as a Hugging Face model directory, float32.

Only what the default model needs: architecture `llama`, tied embeddings, the `smollm` byte-level BPE.
Every value is the one that GGUF's own dequantisation gives. Q4_1 weights are `scale · q + minimum` with two
float16 and four bits: float32 keeps them, bfloat16 (8 bits of mantissa) would not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdq.errors import Misconfigured

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

    Array = np.ndarray[Any, np.dtype[np.float32]]

CONTROL = 3
"""GGUF's token type of special tokens."""

TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, target: Path, model_id: str) -> None:
    """Write config, generation config, tokenizer and `model.safetensors` of `source` into `target`.

    `target` is an existing directory. Raises Misconfigured when `source` is not such a file, or when the
    `gguf` package is not installed.
    """
    try:
        from gguf import GGUFReader
        from safetensors.numpy import save_file
    except ImportError as exc:
        raise Misconfigured(f"converting a GGUF file needs the packages gguf and safetensors: {exc}") from exc
    reader = GGUFReader(source)
    meta = Metadata(reader)
    meta.check()
    documents = {
        "config.json": config(meta, model_id),
        "generation_config.json": generation_config(meta),
        "tokenizer.json": tokenizer(meta),
        "tokenizer_config.json": tokenizer_config(meta),
    }
    for name, document in documents.items():
        (target / name).write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", "utf-8")
    save_file(dict(weights(reader, meta)), target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner alone


class Metadata:
    """The key-value part of a GGUF file."""

    def __init__(self, reader: GGUFReader) -> None:
        self._fields = reader.fields

    def __getitem__(self, key: str) -> Any:
        if key not in self._fields:
            raise Misconfigured(f"the GGUF file has no field {key}")
        return self._fields[key].contents()

    def check(self) -> None:
        found = (self["general.architecture"], self["tokenizer.ggml.model"], self["tokenizer.ggml.pre"])
        if found != ("llama", "gpt2", "smollm"):
            raise Misconfigured(f"cannot convert a GGUF file of kind {'/'.join(map(str, found))}")


def config(meta: Metadata, model_id: str) -> dict[str, Any]:
    heads, hidden = int(meta["llama.attention.head_count"]), int(meta["llama.embedding_length"])
    return {
        "_name_or_path": model_id,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "hidden_size": hidden,
        "head_dim": hidden // heads,
        "intermediate_size": int(meta["llama.feed_forward_length"]),
        "num_hidden_layers": int(meta["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta["llama.attention.head_count_kv"]),
        "max_position_embeddings": int(meta["llama.context_length"]),
        "rms_norm_eps": shortest(meta["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": shortest(meta["llama.rope.freq_base"]),
        "vocab_size": int(meta["llama.vocab_size"]),
        **token_ids(meta),
    }


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    import numpy as np

    return float(str(np.float32(value)))


def token_ids(meta: Metadata) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{short}_token_id": int(meta[f"tokenizer.ggml.{name}_token_id"]) for short, name in names.items()}


def generation_config(meta: Metadata) -> dict[str, Any]:
    return {"_from_model_config": True, **token_ids(meta)}


def tokenizer(meta: Metadata) -> dict[str, Any]:
    """`tokenizer.json`. Single digits are split first: llama.cpp's `smollm`, and the published tokenizer."""
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    special = [(index, token) for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == CONTROL]
    bytes_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": token, **flags} for index, token in special],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, bytes_level],
        },
        "post_processor": None,
        "decoder": {**bytes_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in meta["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(meta: Metadata) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {f"{short}_token": tokens[meta[f"tokenizer.ggml.{name}_token_id"]] for short, name in names.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(meta["llama.context_length"]),
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],
        **special,
    }


def weights(reader: GGUFReader, meta: Metadata) -> Iterator[tuple[str, Array]]:
    """Every tensor under its Hugging Face name, dequantised."""
    from gguf import dequantize

    heads = {"attn_q": int(meta["llama.attention.head_count"]), "attn_k": int(meta["llama.attention.head_count_kv"])}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        yield name_of(tensor.name), unpermute(values, heads[part]) if part in heads else values


def name_of(tensor: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`. Raises Misconfigured."""
    if tensor in TOP:
        return TOP[tensor]
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor)
    if not found or found.group(2) not in PARTS:
        raise Misconfigured(f"the GGUF file has a tensor this converter does not know: {tensor}")
    return f"model.layers.{found.group(1)}.{PARTS[found.group(2)]}.weight"


def unpermute(values: Array, heads: int) -> Array:
    """Q and K rows in Hugging Face's order. `values` is [heads · head_dim, hidden].

    GGUF stores each head's rotary pairs side by side (0, d/2, 1, d/2+1, …); Hugging Face has the two halves
    one after the other.
    """
    import numpy as np

    rows, width = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, width)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, width))
