"""Export of a trained model as plain arrays for one device, and text generated from it."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from swift.checkpoint import RestorePlan, checkpoint_steps, plan_restore
from swift.data import Tokenizer
from swift.errors import SettingError, check_count, check_number, check_seed
from swift.mesh import storage_mesh
from swift.models import GPT, Weights, plain_logits
from swift.train.checkpoints import check_new, load_exported, load_state, pure, write_model
from swift.train.settings import Experiment

MAX_TOKENS = 1_000_000
"""Tokens that a text is continued by at most."""
_TOKENS_BEFORE = 16
"""Tokens of the prompt with which the first new ones are decoded."""


def export_model(experiment: Experiment, run_dir: Path, out: Path, step: int | None = None) -> RestorePlan:
    """Writes the master weights of a run's checkpoint as one plain array per parameter, such as ``head.0.out.kernel``.

    Args:
        experiment: settings of the run.
        run_dir: run directory.
        out: directory to make.
        step: iteration of the checkpoint; the newest intact one unless given.

    Returns:
        The origin of the weights; in a partial checkpoint some experts are older than the iteration.

    Raises:
        SettingError: there is no such checkpoint, it is damaged, or ``out`` exists.
        RunError: the model cannot be written; nothing is left of it.
    """
    check_new(out)
    plan = find_checkpoint(experiment, run_dir, step)
    gpt, weights = load_weights(experiment, run_dir, plan)
    write_model(out, gpt, pure(weights), plan.step)
    return plan


def find_checkpoint(experiment: Experiment, run_dir: Path, step: int | None) -> RestorePlan:
    """Finds and verifies the checkpoint of a run that is exported.

    Args:
        experiment: settings of the run.
        run_dir: run directory.
        step: its iteration; the newest intact one unless given.

    Raises:
        SettingError: there is no such checkpoint, or it is damaged.
    """
    steps = checkpoint_steps(run_dir / "checkpoints")
    if not steps:
        raise SettingError("RUN_DIR", str(run_dir), "holds no checkpoint to export")
    if step is not None and step not in steps:
        raise SettingError("--step", step, f"must be one of {', '.join(map(str, steps))}, which have a checkpoint")
    return plan_restore(run_dir / "checkpoints", experiment.identity(), step)


def load_weights(experiment: Experiment, run_dir: Path, plan: RestorePlan) -> tuple[GPT, Weights]:
    """Reads the master weights of a checkpoint, as (architecture, weights of whole experts)."""
    spec = experiment.step_spec(storage_mesh(experiment.topology))
    state = load_state(run_dir / "checkpoints", plan, spec)
    return spec.gpt, spec.gpt.unpack(spec.whole_classes(state))


def generate(
    experiment: Experiment, path: Path, prompt: str, num_tokens: int, *, temperature: float, top_k: int, seed: int
) -> Iterator[str]:
    """Continues a text, piece by piece.

    Args:
        experiment: settings of the model.
        path: directory of the exported model.
        prompt: text to continue.
        num_tokens: number of tokens to add.
        temperature: temperature of the choice; 0 always takes the likeliest token.
        top_k: number of the likeliest tokens to choose from.
        seed: seed of the choices.

    Yields:
        New text, as soon as it is complete.
    """
    check_count("--tokens", num_tokens, least=1)
    if num_tokens > MAX_TOKENS:
        raise SettingError("--tokens", num_tokens, f"must be at most {MAX_TOKENS:,}")
    check_number("--temperature", temperature, least=0)
    check_count("--top-k", top_k, least=1)
    check_seed("--seed", seed)
    gpt, weights = load_exported(experiment, path)
    wide = jnp.promote_types(experiment.compute_dtype, jnp.float32)
    weights = jax.tree.map(lambda leaf: leaf.astype(wide), weights)
    tokenizer, length = experiment.data.tokenizer, gpt.config.sequence_length
    tokens = [int(token) for token in tokenizer.encode(prompt)] or [tokenizer.separator]
    num_likeliest = min(top_k, gpt.vocab_size)

    @jax.jit
    def choose(weights: Weights, window_T: jax.Array, last: jax.Array, key: jax.Array) -> jax.Array:
        logits_V = plain_logits(gpt, experiment.experts, weights, window_T[None])[0, last]
        values, candidates = jax.lax.top_k(logits_V, num_likeliest)
        scaled = values / jnp.maximum(jnp.asarray(temperature, values.dtype), 1e-6)
        return candidates[jax.random.categorical(key, scaled)]

    def continuation() -> Iterator[int]:
        for key in jax.random.split(jax.random.key(seed), num_tokens):
            seen = tokens[-length:]
            window_T = np.zeros(length, np.int32)
            window_T[: len(seen)] = seen
            tokens.append(int(choose(weights, window_T, len(seen) - 1, key)))
            yield tokens[-1]

    yield from whole_characters(tokenizer, continuation(), tokens[-_TOKENS_BEFORE:])


def whole_characters(tokenizer: Tokenizer, tokens: Iterable[int], before: Sequence[int] = ()) -> Iterator[str]:
    """Yields the text of tokens, piece by piece; a character of several tokens comes when it is complete.

    Args:
        tokenizer: tokenizer that decodes them.
        tokens: tokens to decode.
        before: tokens that they follow, and that are not shown: some tokenizers begin a text without its first space.
    """
    seen = list(before)
    shown = tokenizer.decode(np.array(seen)) if seen else ""
    for token in tokens:
        seen.append(token)
        text = tokenizer.decode(np.array(seen))
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(shown) :]
            shown = text
