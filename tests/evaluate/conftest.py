"""A model of which the tests use the whole forward pass alone, as the judge of what an engine finds."""

import jax
import numpy as np
import pytest

from swift.data.tokenizer import ByteTokenizer
from swift.evaluate.scoring import ask, prepare_questions
from swift.experts.config import ExpertConfig
from swift.generate.engine import TextEngine, TextEngineConfig
from swift.models.config import ModelConfig
from swift.models.gpt import GPT
from swift.models.reference_model import plain_logits

EXPERTS = ExpertConfig(num_classes=4, top_k=2)
LENGTH = 64
SHAPE = ModelConfig(num_layers=2, model_dim=8, num_heads=2, ffn_dim=12, sequence_length=LENGTH)


class Whole:
    """A model of bytes, and an engine for it."""

    def __init__(self):
        self.gpt = GPT(SHAPE, 256, EXPERTS.num_classes)
        # Steep, so that what it finds likely depends on what stands before.
        packed = jax.tree.map(lambda leaf: 3 * leaf, self.gpt.init(jax.random.key(3)))
        self.weights = self.gpt.unpack(packed)
        self._run = jax.jit(lambda tokens: plain_logits(self.gpt, EXPERTS, self.weights, tokens)[0])

    def log_probs(self, tokens):
        window = np.zeros((1, LENGTH), np.int32)
        window[0, : len(tokens)] = tokens
        logits = np.asarray(self._run(window), np.float64)[: len(tokens)]
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    def score(self, begin, end):
        """Log-probability of a text that follows another, of which the last positions are seen."""
        tokens = [*begin, *end][-LENGTH - 1 :]
        rows = range(len(tokens) - len(end), len(tokens))
        log_probs = self.log_probs(tokens[:-1])
        return sum(log_probs[row - 1, tokens[row]] for row in rows)

    def continued(self, begin, count, stops):
        tokens = list(begin)
        for _ in range(count):
            tokens.append(int(self.log_probs(tokens[-LENGTH:])[-1].argmax()))
            text = bytes(tokens[len(begin) :]).decode(errors="replace")
            if tokens[-1] == 0 or any(stop in text for stop in stops):
                break
        text = bytes(tokens[len(begin) :]).decode(errors="replace").replace("\0", "")
        return min((text.partition(stop)[0] for stop in stops), key=len, default=text)

    def engine(self):
        return TextEngine(self.gpt, EXPERTS, self.weights, TextEngineConfig(batch=4))

    def asked(self, questions):
        engine = self.engine()
        asked = prepare_questions(engine, ByteTokenizer(), "mine.jsonl", questions)
        found = [judgement for judgements in ask(engine, ByteTokenizer(), asked) for judgement in judgements]
        assert engine.is_idle
        self.computed = engine.computed
        return sorted(found, key=lambda judgement: judgement.line)


@pytest.fixture(scope="session")
def whole():
    """The model."""
    return Whole()
