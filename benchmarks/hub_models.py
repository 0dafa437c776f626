"""One random model in two forms: run by ``transformers`` with torch, and imported into Swift."""

import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from swift.config.gin_reader import load_stored
from swift.experts.config import ExpertConfig
from swift.hub.importing import import_hugging_face
from swift.models.gpt import GPT, Weights
from swift.train.model_directory import load_exported

MIXTRAL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": 0,
}


def both_models(vocab_size: int) -> tuple[Any, GPT, ExpertConfig, Weights]:
    """Creates (model of ``transformers``, Swift's architecture, settings of the experts, weights), all in float32."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("mixtral", vocab_size=vocab_size, **MIXTRAL)
    theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    words = {"<|endoftext|>": 0} | {f"w{number}": number for number in range(1, vocab_size)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<|endoftext|>"},
    }
    with tempfile.TemporaryDirectory() as directory:
        hub, ours = Path(directory, "hub"), Path(directory, "ours")
        theirs.save_pretrained(hub)
        (hub / "tokenizer.json").write_text(json.dumps(tokenizer))
        import_hugging_face(hub, ours)
        experiment = load_stored(ours, "MODEL", None)
        gpt, weights = load_exported(experiment, ours)
    return theirs, gpt, experiment.experts, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights)
