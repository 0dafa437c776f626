"""The generation engine: prompt tokens computed over the fewest possible, and time with and without sharing.

Where torch and ``transformers`` are installed (the extra ``peers``), also CPU-seconds over theirs.
"""

import statistics
import time
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from measure import cpu_seconds, paired_costs, publish, ratio

from swift.data.tokenizer import ByteTokenizer
from swift.experts.config import ExpertConfig
from swift.generate.engine import TextEngine, TextEngineConfig
from swift.generate.request import GREEDY, Request, Sampling
from swift.models.config import ModelConfig
from swift.models.gpt import GPT

SHAPE = ModelConfig(
    num_layers=4,
    model_dim=128,
    num_heads=4,
    ffn_dim=256,
    sequence_length=1024,
    moe_pattern=(True,),
    norm="rmsnorm",
    positions="rope",
    activation="swiglu",
)
EXPERTS = ExpertConfig(num_classes=8, top_k=2)
SIZES = {"batch": 16, "cache_tokens": 8192, "prefill_passages": 8, "prefill_length": 64}
LIMITS = {"5 shots x 200 questions": 0.3, "8 samples x 50 prompts": 0.5}
"""Limit of the wall time with sharing over that without."""
ROUNDS = 3
PEER_LIMIT = 1.0
"""Limit of the CPU-seconds per generated token over those of ``transformers`` with its static cache."""
PEER_ROUNDS = 7
PEER_VOCABULARIES = 256, 4096, 50304
NUM_TEXTS, PROMPT_TOKENS, NEW_TOKENS = 16, 64, 128


def few_shot() -> list[Request]:
    """Builds 200 requests with the same five examples of 120 bytes before each question; answers have 4 tokens."""
    random = np.random.default_rng(0)
    shots = "".join(f"Q: {_noise(random, 96)}\nA: {_noise(random, 16)}\n" for _ in range(5))
    return [_request(f"{shots}Q: {_noise(random, 32)}\nA: ", 4, GREEDY) for _ in range(200)]


def samples() -> list[Request]:
    """Builds requests for 8 samples of 8 tokens for each of 50 prompts of 500 bytes."""
    random = np.random.default_rng(1)
    prompts = [_noise(random, 500) for _ in range(50)]
    return [_request(prompt, 8, Sampling(1.0, stream=stream)) for prompt in prompts for stream in range(8)]


def _noise(random: np.random.Generator, length: int) -> str:
    return "".join(chr(code) for code in random.integers(97, 123, length))


def _request(text: str, max_tokens: int, sampling: Sampling) -> Request:
    return Request(ByteTokenizer().encode(text).tolist(), max_tokens, sampling)


def fewest(requests: Sequence[Request]) -> int:
    """Computes the fewest prompt tokens possible: the number of distinct prefixes, the nodes of their trie."""
    texts = sorted({tuple(request.tokens) for request in requests})
    shared = 0
    for one, other in pairwise(texts):
        shared += next((n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
    return sum(map(len, texts)) - shared


def measured(gpt: GPT, weights: Any, requests: Sequence[Request]) -> dict[str, Any]:
    """Measures the engine with and without sharing, in turns, after a warm-up round that compiles."""
    kept: dict[str, list[float]] = {"wall": [], "cpu": []}
    ratios: dict[str, list[float]] = {"wall": [], "cpu": []}
    computed = 0
    for number in range(ROUNDS + 1):
        spent = {}
        for shares in (True, False) if number % 2 else (False, True):
            engine = TextEngine(gpt, EXPERTS, weights, TextEngineConfig(**SIZES, share_prefixes=shares))
            start = time.perf_counter(), cpu_seconds()
            engine.answers(requests if number else requests[:16])
            spent[shares] = {"wall": time.perf_counter() - start[0], "cpu": cpu_seconds() - start[1]}
            computed = engine.computed.prompt_tokens if shares else computed
        for kind in kept if number else ():
            kept[kind].append(spent[True][kind])
            ratios[kind].append(spent[True][kind] / spent[False][kind])
    return {
        "prompt_tokens": computed,
        "fewest": fewest(requests),
        "over_fewest": round(computed / fewest(requests), 4),
        "wall_s": round(statistics.median(kept["wall"]), 2),
        "cpu_s": round(statistics.median(kept["cpu"]), 2),
        "ratios": {kind: [round(one, 4) for one in values] for kind, values in ratios.items()},
        "ratio": round(statistics.median(ratios["wall"]), 4),
        "cpu_ratio": round(statistics.median(ratios["cpu"]), 4),
    }


def over_transformers(vocab_size: int) -> dict[str, Any]:
    """Measures the greedy continuation of a batch of texts against ``transformers`` with the same model, in turns."""
    import torch
    from hub_models import both_models

    torch.set_num_threads(1)  # two threads would busy-wait beside other programs and use 30 times the CPU-seconds
    theirs, gpt, experts, weights = both_models(vocab_size)
    prompts = np.random.default_rng(2).integers(1, 256, (NUM_TEXTS, PROMPT_TOKENS))
    length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}

    def peer() -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.no_grad():
            found = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, cache_implementation="static", **length
            )
        return found[:, PROMPT_TOKENS:].tolist()

    def ours() -> list[list[int]]:
        engine = TextEngine(gpt, experts, weights, TextEngineConfig(**SIZES))
        return [
            answer.tokens for answer in engine.answers(Request(row, NEW_TOKENS, GREEDY) for row in prompts.tolist())
        ]

    calls = {"peer": peer, "ours": ours}
    tokens = {name: np.array(call()) for name, call in calls.items()}
    costs = paired_costs(calls, PEER_ROUNDS)
    count = NUM_TEXTS * NEW_TOKENS
    return {
        "milliseconds_a_token": {
            name: round(1000 * statistics.median(cost) / count, 3) for name, cost in costs.items()
        },
        "equal_tokens": float((tokens["peer"] == tokens["ours"]).mean()),
        "over_peer": ratio(costs, "ours", "peer"),
    }


def main() -> int:
    gpt = GPT(SHAPE, 256, EXPERTS.num_classes)
    weights = gpt.unpack(jax.jit(gpt.init)(jax.random.key(0)))
    figures = {
        name: measured(gpt, weights, requests()) for name, requests in zip(LIMITS, (few_shot, samples), strict=True)
    }
    claims = {f"{name}, with sharing over without": (figures[name]["ratio"], limit) for name, limit in LIMITS.items()}
    claims |= {f"{name}, tokens over the fewest": (figures[name]["over_fewest"], 1.04) for name in LIMITS}
    if find_spec("torch") and find_spec("transformers"):
        figures["transformers"] = {size: over_transformers(size) for size in PEER_VOCABULARIES}
        claims |= {
            f"a generated token of {size} over transformers": (peer["over_peer"]["median"], PEER_LIMIT)
            for size, peer in figures["transformers"].items()
        }
    return publish("generate", figures, claims)


if __name__ == "__main__":
    raise SystemExit(main())
