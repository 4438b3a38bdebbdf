from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pooled_mlx.core.card import SamplingDefaults, ThinkingRule
from pooled_mlx.store import StoreError
from pooled_mlx.store.derive import card_id, context_length, derive_card, eos_ids, sampling_defaults, thinking_rule
from pooled_mlx.store.fetch import fetch
from pooled_mlx.store.folder import chat_template, check_folder
from tests.shared_data import shared_path


def write_weights(path: Path, size: int = 64) -> None:
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}, "__metadata__": {"format": "mlx"}})
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(size))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A minimal whole model folder."""
    path = tmp_path / "My Model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 4096}))
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    write_weights(path / "model.safetensors")
    return path


def change(folder: Path, name: str, **values: Any) -> None:
    path = folder / name
    table = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**table, **values}))


def test_whole_folder_passes(folder: Path):
    check_folder(folder)
    card = derive_card(folder)
    assert (card.id, card.label, card.folder, card.weights_bytes) == (
        "my-model",
        "My Model",
        str(folder),
        (folder / "model.safetensors").stat().st_size,
    )
    assert card.minimum_memory_bytes == 0


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 5000000000\n"
MARKER_CODE = "import pathlib\npathlib.Path('marker').write_text('executed')\n"


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("config.json", {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}),
        ("config.json", {"model_file": "modeling_evil.py"}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["modeling_evil.Evil", None]}}),
    ],
)
def test_code_in_a_model_folder_is_refused_and_never_run(folder: Path, name: str, entry: dict, monkeypatch: pytest.MonkeyPatch):
    (folder / "modeling_evil.py").write_text(MARKER_CODE)
    change(folder, name, **entry)
    monkeypatch.chdir(folder)
    with pytest.raises(StoreError, match=r"wants to run its own code.*Code from a model folder is never run") as caught:
        check_folder(folder)
    assert "modeling_evil.py" in str(caught.value)
    assert not (folder / "marker").exists()


def test_auto_map_without_code_is_harmless(folder: Path):
    change(folder, "config.json", auto_map={"AutoModel": "modeling_x.X"})
    check_folder(folder)
    assert derive_card(folder).id == "my-model"


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: (f / "config.json").unlink(), r"config\.json is missing"),
        (lambda f: [path.unlink() for path in f.iterdir()], r"has no config\.json: it is no model in mlx-lm's format"),
        (lambda f: (f / "config.json").write_text(""), r"config\.json is damaged: it is empty"),
        (lambda f: (f / "tokenizer_config.json").write_text('{"chat_template": "{{ me'), r"tokenizer_config\.json is damaged"),
        (
            lambda f: (f / "tokenizer.json").write_text('{"model": {"vocab": {"a": 1'),
            r"tokenizer\.json is damaged: it breaks off",
        ),
        (lambda f: (f / "tokenizer.json").write_bytes(b""), r"tokenizer\.json is damaged: it is empty"),
        (lambda f: (f / "tokenizer.model").write_bytes(b""), r"tokenizer\.model is damaged: it is empty"),
        (lambda f: (f / "chat_template.jinja").write_bytes(b""), r"chat_template\.jinja is damaged: it is empty"),
        (lambda f: (f / "model.safetensors").write_bytes(POINTER), "is no more than a Git LFS pointer to the file"),
        (lambda f: (f / "tokenizer.json").write_bytes(POINTER), "is no more than a Git LFS pointer to the file"),
        (lambda f: (f / "model.safetensors.index.json").write_text("["), r"model\.safetensors\.index\.json is damaged"),
        (lambda f: (f / "config.json").write_text("{"), r"config\.json is damaged"),
        (lambda f: (f / "config.json").write_text("[]"), "holds a list"),
        (lambda f: (f / "config.json").write_text("{}"), "no model_type"),
        (lambda f: (f / "model.safetensors").unlink(), "has no weights"),
        (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-1]), "its header says"),
        (lambda f: (f / "model.safetensors").write_bytes(b"<html>not found</html>"), "is damaged"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "is damaged"),
        (lambda f: (f / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
        (lambda f: (f / "tokenizer_config.json").write_text("{}"), "has no chat template: it is a base model"),
    ],
)
def test_what_is_missing_is_named(folder: Path, harm: Any, message: str):
    harm(folder)
    with pytest.raises(StoreError, match=message):
        check_folder(folder)


def test_missing_shard_is_named(folder: Path):
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    (folder / "model.safetensors").unlink()
    write_weights(folder / names[0])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": names[0], "b": names[1]}}))
    with pytest.raises(StoreError, match=r"1 of 2 weight files missing \(model-00002"):
        check_folder(folder)
    write_weights(folder / names[1])
    check_folder(folder)
    assert derive_card(folder).weights_bytes == sum((folder / name).stat().st_size for name in names)


SHARDS = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]


def split(folder: Path, *names: str) -> None:
    (folder / "model.safetensors").unlink()
    for name in names:
        write_weights(folder / name)


def complaint(folder: Path) -> str:
    with pytest.raises(StoreError) as caught:
        check_folder(folder)
    return str(caught.value)


def test_shards_without_an_index_are_counted_by_their_names(folder: Path):
    split(folder, *SHARDS[:2])
    text = complaint(folder)
    assert f"is not whole: 1 of 3 weight files missing ({SHARDS[2]}). " in text
    assert text.endswith(f"hf download OWNER/NAME {SHARDS[2]} --local-dir '{folder}'")
    write_weights(folder / SHARDS[2])
    check_folder(folder)


def test_every_file_that_is_missing_or_damaged_is_named_with_the_command(folder: Path):
    split(folder, SHARDS[1])
    whole = (folder / SHARDS[1]).read_bytes()
    (folder / SHARDS[1]).write_bytes(whole[:-9])
    (folder / "tokenizer.json").write_bytes(b"")
    text = complaint(folder)
    assert f"2 of 3 weight files missing ({SHARDS[0]}, {SHARDS[2]}); " in text
    assert f"{SHARDS[1]} is damaged: it has {len(whole) - 9} bytes, its header says {len(whole)}; tokenizer.json is" in text
    names = f"{SHARDS[0]} {SHARDS[2]} {SHARDS[1]} tokenizer.json"
    assert text.endswith(f"hf download OWNER/NAME {names} --local-dir '{folder}' --force-download")


def test_an_index_that_names_absent_files_names_all_of_them(folder: Path):
    split(folder, SHARDS[0])
    weights = dict(zip("abc", SHARDS, strict=True))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    assert f"2 of 3 weight files missing ({SHARDS[1]}, {SHARDS[2]})" in complaint(folder)


def test_shards_of_two_models_are_not_taken_for_one(folder: Path):
    split(folder, SHARDS[0], "model-00002-of-00002.safetensors")
    text = complaint(folder)
    assert "belong to different sets (1 named model-…-of-00002, 1 named model-…-of-00003): remove what does not" in text
    assert "hf download" not in text


def test_many_missing_files_make_no_endless_line(folder: Path):
    split(folder, "model-00001-of-00163.safetensors")
    text = complaint(folder)
    assert "162 of 163 weight files missing (model-00002-of-00163.safetensors, " in text
    assert "and 132 more)" in text
    assert text.endswith(f"hf download OWNER/NAME --local-dir '{folder}'")


def test_pointers_of_a_clone_are_replaced_by_git(folder: Path):
    (folder / ".git").mkdir()
    (folder / "model.safetensors").write_bytes(POINTER)
    assert complaint(folder).endswith(f"git -C '{folder}' lfs pull fetches the files")


def test_a_folder_of_the_hubs_cache_is_completed_by_name(folder: Path, tmp_path: Path):
    snapshot = tmp_path / "hub" / "models--some--one-model" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (snapshot / "model.safetensors").write_bytes(b"")
    assert "pooled-mlx models pull some/one-model fetches what is missing or damaged" in complaint(snapshot)


def test_an_old_index_beside_one_weight_file(folder: Path):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00001-of-00009.safetensors"}}))
    check_folder(folder)
    assert derive_card(folder).weights_bytes > 0


def test_a_header_that_claims_too_much(folder: Path):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}")
    with pytest.raises(StoreError, match="its header is damaged"):
        check_folder(folder)


def test_where_templates_lie(folder: Path):
    assert chat_template(folder) == "{{ messages }}"
    change(
        folder,
        "tokenizer_config.json",
        chat_template=[{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}],
    )
    assert chat_template(folder) == "D"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    assert chat_template(folder) == "J"
    (folder / "chat_template.jinja").write_text("X")
    assert chat_template(folder) == "X"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mlx-community/Qwen3-4B-4bit", "qwen3-4b-4bit"),
        ("/models/My Model (v2)/", "my-model-v2"),
        ("...", "model"),
        ("x" * 200, "x" * 80),
    ],
)
def test_card_ids(name: str, expected: str):
    assert card_id(name) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 1000}, 1000),
        ({"text_config": {"max_position_embeddings": 2000}}, 2000),
        ({"max_position_embeddings": None, "seq_length": 300}, 300),
        ({}, 4096),
    ],
)
def test_context_length(config: dict, expected: int):
    assert context_length(config) == expected


def test_long_context_opens_shorter(folder: Path):
    change(folder, "config.json", max_position_embeddings=262_144)
    card = derive_card(folder)
    assert (card.context_default, card.context_max) == (131_072, 262_144)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, {}, (2,)),
        ({"eos_token_id": 2}, {"eos_token_id": [5, 6]}, (5, 6)),
        ({"text_config": {"eos_token_id": 9}}, {}, (9,)),
        ({"eos_token_id": None}, {}, ()),
    ],
)
def test_eos(config: dict, generation: dict, expected: tuple):
    assert eos_ids(config, generation) == expected


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, SamplingDefaults()),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05}, SamplingDefaults(0.6, 20, 0.95, 0.05)),
        ({"temperature": 1, "top_k": 200}, SamplingDefaults(1.0, 64)),
        ({"temperature": -1, "top_k": 0, "top_p": "x", "min_p": None}, SamplingDefaults()),
        ({"do_sample": False}, SamplingDefaults()),
    ],
)
def test_published_sampling_values_are_the_defaults(generation: dict, expected: SamplingDefaults):
    assert sampling_defaults(generation) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages }}", ThinkingRule()),
        ("{% if enable_thinking %}x{% endif %}", ThinkingRule(supported=True)),
        ("<think>{{ messages }}", ThinkingRule(supported=True)),
        ("{{ 'enable_thinking' }} {{ m.thinking }}", ThinkingRule()),
        ("{% if thinking %}x{% endif %}", ThinkingRule(supported=True, switch="thinking")),
        (
            "{% if enable_thinking %}{% if not clear_thinking %}x{% endif %}{% endif %}",
            ThinkingRule(supported=True, keep_options={"clear_thinking": False}),
        ),
    ],
)
def test_thinking_by_template(template: str, expected: ThinkingRule):
    assert thinking_rule(template) == expected


def test_effort_levels_by_template():
    template = "{% set levels = ['low', 'medium', 'xhigh'] %}{% if reasoning_effort in levels %}x{% endif %}"
    rule = thinking_rule(template)
    assert rule.effort_variable == "reasoning_effort"
    assert rule.efforts == {"low": "low", "medium": "medium", "high": "xhigh", "xhigh": "xhigh", "max": "xhigh"}
    three = thinking_rule("{{ reasoning_effort }} {% if enable_thinking %}{% endif %}").efforts
    assert three == {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


def test_the_published_template_of_qwen36():
    rule = thinking_rule(shared_path("templates/qwen3.6.jinja").read_text())
    assert rule == ThinkingRule(supported=True, keep_options={"preserve_thinking": True})


class Down(Exception):
    pass


def test_every_failed_connection_is_reported_so_that_a_stall_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Session:
        def stream(self, *_: Any, **__: Any) -> Any:
            raise Down

    monkeypatch.setattr("pooled_mlx.store.fetch.time.sleep", lambda seconds: None)
    seen: list[int] = []
    arguments: dict[str, Any] = {"size": 5, "sha256": None, "headers": {}, "transport_errors": (Down,), "advance": seen.append}
    with pytest.raises(Down):
        fetch(Session(), "http://x", tmp_path / "blob", **arguments)
    assert seen == [0] * 6


def test_one_file_is_downloaded_by_one_process_at_a_time(tmp_path: Path):
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'ab'); fcntl.flock(f, fcntl.LOCK_EX)\n"
        "print('locked', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "blob.partial")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        arguments: dict[str, Any] = {"size": 5, "sha256": None, "headers": {}, "transport_errors": (), "advance": print}
        with pytest.raises(StoreError, match="another process is downloading blob already"):
            fetch(None, "http://x", tmp_path / "blob", **arguments)
    finally:
        holder.communicate("")
