"""Comparison with ``transformers`` on torch: the same OLMoE, batch and optimizer, on a CPU.

There are two of about 30 million parameters, with few experts and with many small ones.

Weights are drawn by ``transformers`` and read by ``swift import``, so the first losses have to be the same. Both train
in float32 with AdamW, drop no token and have two threads. The figures are CPU-seconds and wall time of a step, in
turns; theirs with the experts one after the other (``eager``) and as one grouped matmul, where it has that. Needs the
extra ``peers``.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

THREADS = 2
os.environ |= {  # read when the libraries are loaded; threads of OpenMP would else spin while the other one computes
    "OMP_NUM_THREADS": str(THREADS),
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
    "XLA_FLAGS": f"--xla_cpu_multi_thread_eigen=true {os.environ.get('XLA_FLAGS', '')}",
}

import jax  # noqa: E402
import numpy as np  # noqa: E402
import tokenizers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from measure import cost_of, median, publish, ratio, turns  # noqa: E402

from swift.cli.main import main as swift  # noqa: E402
from swift.config.gin_reader import load_stored  # noqa: E402
from swift.data.windows import Batch  # noqa: E402
from swift.experts.config import RankCapacity  # noqa: E402
from swift.experts.optimizer import OptimizerConfig  # noqa: E402
from swift.experts.placement.policy import Static  # noqa: E402
from swift.pipeline.step.single_worker import put_batch, single_worker_step  # noqa: E402
from swift.topology import Topology  # noqa: E402
from swift.train.build import make_step_spec  # noqa: E402
from swift.train.model_directory import load_exported  # noqa: E402

VOCABULARY, LENGTH, SEQUENCES = 8192, 256, 8
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": LENGTH,
    "norm_topk_prob": False,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": None,
    "router_aux_loss_coef": 0.0,
}
EXPERTS = {
    "16 of 512, top-4": {"num_experts": 16, "intermediate_size": 512, "num_experts_per_tok": 4},
    "60 of 176, top-6": {"num_experts": 60, "intermediate_size": 176, "num_experts_per_tok": 6},
}
RATE, BETAS, DECAY, EPSILON = 1e-4, (0.9, 0.95), 0.1, 1e-8
LIMITS = {"16 of 512, top-4": 1.0, "60 of 176, top-6": 1.1}
"""Limit of CPU-seconds of a step over theirs, whichever of theirs is faster."""


class Theirs:
    """A training step of ``transformers``.

    Args:
        path: directory of the model.
        experts: how the experts are computed, in its words.
        batch: inputs and labels ``[B, T]``.
    """

    def __init__(self, path: Path, experts: str, batch: Batch):
        settings = {"attn_implementation": "sdpa", "experts_implementation": experts, "dtype": torch.float32}
        self._model = transformers.AutoModelForCausalLM.from_pretrained(path, **settings).train()
        self._inputs, self._labels = (torch.tensor(of, dtype=torch.long) for of in (batch.inputs, batch.labels))
        parameters = self._model.parameters()
        self._optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY)

    def __call__(self) -> float:
        """Runs one iteration and returns its loss."""
        self._optimizer.zero_grad(set_to_none=True)
        logits = self._model(self._inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), self._labels.reshape(-1))
        loss.backward()
        self._optimizer.step()
        return loss.item()


class Ours:
    """The same step of this library, on one rank.

    Args:
        path: model directory, as ``swift import`` makes it.
        batch: inputs and labels ``[B, T]``.
    """

    def __init__(self, path: Path, batch: Batch):
        stored = load_stored(path, "MODEL", None)
        experts = replace(
            stored.experts,
            slots_per_rank=stored.experts.num_classes,
            capacity=RankCapacity(factor=None),
            aux_loss_coefficient=0.0,
        )
        options = {"b1": BETAS[0], "b2": BETAS[1], "eps": EPSILON, "weight_decay": DECAY}
        rates = {"peak_learning_rate": RATE, "final_learning_rate": RATE, "warmup_steps": 0}
        experiment = replace(
            stored,
            experts=experts,
            placement=Static(),
            topology=Topology(num_expert_ranks=1),
            optimizer=OptimizerConfig(options=options, clip_norm=None, **rates),
            sequences_per_microbatch=SEQUENCES,
        )
        gpt, weights = load_exported(stored, path)
        self._spec = make_step_spec(experiment)
        self._state = self._spec.state_from_params(gpt.pack(weights))
        self._step = single_worker_step(self._spec)
        self._batch = put_batch(Batch(*(of[None] for of in batch)), self._spec.live)
        self.num_parameters = gpt.num_parameters

    def __call__(self) -> float:
        """Runs one iteration and returns its loss."""
        self._state, metrics = self._step(self._state, self._batch)
        return float(np.asarray(metrics["loss"]).ravel()[0])


def write_model(path: Path, experts: Mapping[str, int]) -> None:
    """Writes a directory of the hub with random weights and experts of some shape."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("olmoe", **SHAPE, **experts)
    )
    model.save_pretrained(path)
    words = {"<|endoftext|>": 0} | {f"w{number}": number for number in range(1, VOCABULARY)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<|endoftext|>"))
    made.save(str(path / "tokenizer.json"))


def draw_batch() -> Batch:
    """Tokens as unevenly frequent as words are."""
    weights = 1 / np.arange(2, VOCABULARY + 2)
    shape = (SEQUENCES, LENGTH + 1)
    tokens = np.random.default_rng(0).choice(VOCABULARY, shape, p=weights / weights.sum()).astype(np.int32)
    return Batch(tokens[:, :-1], tokens[:, 1:], np.ones((SEQUENCES, LENGTH), bool))


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """(CPU-seconds, seconds) of a call."""
    begun = time.perf_counter()
    cost = cost_of(call)
    return cost, time.perf_counter() - begun


def compared(experts: Mapping[str, int], rounds: int) -> dict[str, Any]:
    """Measures steps of the three models in turns."""
    batch = draw_batch()
    with tempfile.TemporaryDirectory() as directory:
        hub, imported = Path(directory) / "hub", Path(directory) / "model"
        write_model(hub, experts)
        with open(os.devnull, "w") as nowhere:
            told, sys.stdout = sys.stdout, nowhere
            code = swift(["import", str(hub), "--out", str(imported)])
            sys.stdout = told
        assert code == 0
        ours = Ours(imported, batch)
        calls = {"ours": ours, "eager": Theirs(hub, "eager", batch), "grouped": Theirs(hub, "grouped_mm", batch)}
    first = {name: call() for name, call in calls.items()}
    calls["ours"]()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for name in turns(list(calls), rounds):
        found[name].append(timed(calls[name]))
    costs = {name: [cost for cost, _ in of] for name, of in found.items()}
    best = min(("eager", "grouped"), key=lambda name: statistics.median(costs[name]))
    return {
        "parameters": ours.num_parameters,
        "first_loss": first,
        "cpu_s": {name: median(of) for name, of in costs.items()},
        "wall_s": {name: median([wall for _, wall in of]) for name, of in found.items()},
        "over": best,
        "cpu_ratio": ratio(costs, "ours", best),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--experts", choices=EXPERTS, action="append", help="one of the two models alone")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    models = {name: compared(EXPERTS[name], options.rounds) for name in options.experts or EXPERTS}
    figures = {
        "tokens": SEQUENCES * LENGTH,
        "threads": THREADS,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "models": models,
    }
    claims = {}
    for name, model in models.items():
        first = model["first_loss"]
        difference = max(abs(first["ours"] - first[theirs]) for theirs in ("eager", "grouped"))
        claims[f"{name}: CPU-seconds"] = model["cpu_ratio"]["median"], LIMITS[name]
        claims[f"{name}: first loss"] = difference, 1e-4
    return publish("peers", figures, claims)


if __name__ == "__main__":
    assert jax.devices()[0].platform == "cpu"
    sys.exit(main())
