"""Continuation of texts by a trained model, several at once."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from swift.config.experiment import Experiment
from swift.data.tokenizer import Tokenizer, prompt_tokens
from swift.errors import MAX_TOKENS, SettingError, check_count
from swift.generate.engine import TextEngine, TextEngineConfig
from swift.generate.programs import StreamedText
from swift.generate.request import Answer, Request, Sampling
from swift.train.model_directory import load_float32

_MOST_AT_ONCE = 16
"""Maximum number of texts that are continued at the same time."""


def generate(
    experiment: Experiment,
    path: Path,
    prompts: Sequence[str],
    num_tokens: int,
    sampling: Sampling,
    expert_ranks: int = 1,
) -> Iterator[tuple[int, str]]:
    """Continues texts with a trained model, and streams the new text.

    If a text is longer than ``sequence_length`` tokens, the model sees only the last ones.

    Args:
        experiment: settings of the model.
        path: model directory.
        prompts: texts to continue.
        num_tokens: number of tokens to add to each text.
        sampling: rule by which tokens are chosen; every text has its own random stream.
        expert_ranks: number of devices over which the experts are distributed.

    Returns:
        Iterator over pairs (index of the prompt, next piece of its new text); a piece has only complete characters.

    Raises:
        SettingError: the model, a prompt or the number of tokens is invalid; raised immediately, not with the first
            piece.
    """
    check_count("--tokens", num_tokens, least=1, most=MAX_TOKENS)
    for prompt in prompts:
        _check_prompt(prompt)
    gpt, weights = load_float32(experiment, path)
    tokenizer, length = experiment.data.tokenizer, gpt.config.sequence_length
    texts = [prompt_tokens(tokenizer, prompt) for prompt in prompts]
    longest = sorted(min(length, len(text) + num_tokens) for text in texts)[-_MOST_AT_ONCE:]
    config = TextEngineConfig(batch=len(longest), cache_tokens=sum(longest), expert_ranks=expert_ranks)
    engine = TextEngine(gpt, experiment.experts, weights, config)
    answers = [
        engine.submit(Request(text[-length:], num_tokens, replace(sampling, stream=number)))
        for number, text in enumerate(texts)
    ]
    return _pieces(engine, tokenizer, texts, answers)


def _check_prompt(prompt: str) -> None:
    """Raises SettingError if a prompt from the command line contains bytes that are not UTF-8."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise SettingError("--prompt", prompt, "must be a text in UTF-8") from error


def _pieces(
    engine: TextEngine, tokenizer: Tokenizer, texts: Sequence[Sequence[int]], answers: Sequence[Answer]
) -> Iterator[tuple[int, str]]:
    shown, counts = [StreamedText(tokenizer, tokens) for tokens in texts], [0] * len(texts)
    while not engine.is_idle:
        engine.step()
        for number, (text, answer) in enumerate(zip(shown, answers, strict=True)):
            for token in answer.tokens[counts[number] :]:
                piece = text.after(token)
                if piece:
                    yield number, piece
            counts[number] = len(answer.tokens)
