"""The generation engine: prompt tokens computed over the fewest possible, and CPU-seconds with and without sharing."""

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from measure import cpu_seconds, publish

from swift.data import ByteTokenizer
from swift.experts import ExpertConfig
from swift.generate import GREEDY, Request, Sampling, TextEngine, TextEngineConfig
from swift.models import GPT, ModelConfig

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
"""CPU-seconds with sharing over those without it."""
ROUNDS = 3


def few_shot() -> list[Request]:
    """200 questions after the same five examples of 120 bytes, each answered with 4 tokens."""
    random = np.random.default_rng(0)
    shots = "".join(f"Q: {_noise(random, 96)}\nA: {_noise(random, 16)}\n" for _ in range(5))
    return [_request(f"{shots}Q: {_noise(random, 32)}\nA: ", 4, GREEDY) for _ in range(200)]


def samples() -> list[Request]:
    """8 samples of each of 50 prompts of 500 bytes, 8 tokens long."""
    random = np.random.default_rng(1)
    prompts = [_noise(random, 500) for _ in range(50)]
    return [_request(prompt, 8, Sampling(1.0, stream=stream)) for prompt in prompts for stream in range(8)]


def _noise(random: np.random.Generator, length: int) -> str:
    return "".join(chr(code) for code in random.integers(97, 123, length))


def _request(text: str, max_tokens: int, sampling: Sampling) -> Request:
    return Request(ByteTokenizer().encode(text).tolist(), max_tokens, sampling)


def fewest(requests: Sequence[Request]) -> int:
    """Number of distinct beginnings: the nodes of the tree of all prompts."""
    texts = sorted({tuple(request.tokens) for request in requests})
    shared = 0
    for one, other in pairwise(texts):
        shared += next((n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
    return sum(map(len, texts)) - shared


def measured(gpt: GPT, weights: Any, requests: Sequence[Request]) -> dict[str, Any]:
    """Measures both engines in turns, after a round that compiles."""
    ratios, seconds, computed = [], [], 0
    for number in range(ROUNDS + 1):
        spent = {}
        for shares in (True, False) if number % 2 else (False, True):
            engine = TextEngine(gpt, EXPERTS, weights, TextEngineConfig(**SIZES, share_prefixes=shares))
            start = cpu_seconds()
            engine.answers(requests if number else requests[:16])
            spent[shares] = cpu_seconds() - start
            computed = engine.computed.prompt_tokens if shares else computed
        if number:
            ratios.append(spent[True] / spent[False])
            seconds.append(spent[True])
    return {
        "prompt_tokens": computed,
        "fewest": fewest(requests),
        "over_fewest": round(computed / fewest(requests), 4),
        "cpu_seconds": round(statistics.median(seconds), 2),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "ratio": round(statistics.median(ratios), 4),
    }


def main() -> int:
    gpt = GPT(SHAPE, 256, EXPERTS.num_classes)
    weights = gpt.unpack(jax.jit(gpt.init)(jax.random.key(0)))
    figures = {
        name: measured(gpt, weights, requests()) for name, requests in zip(LIMITS, (few_shot, samples), strict=True)
    }
    claims = {f"{name}, with sharing over without": (figures[name]["ratio"], limit) for name, limit in LIMITS.items()}
    claims |= {f"{name}, tokens over the fewest": (figures[name]["over_fewest"], 1.04) for name in LIMITS}
    return publish("generate", figures, claims)


if __name__ == "__main__":
    raise SystemExit(main())
