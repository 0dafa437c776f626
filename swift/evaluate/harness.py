"""Adapter for lm-eval: implements its model interface with a generation engine."""

from collections.abc import Mapping, Sequence
from typing import Any

from swift.data.tokenizer import Tokenizer, prompt_tokens, text_tokens
from swift.errors import SettingError
from swift.evaluate.scoring import seen
from swift.evaluate.tasks import before_stops
from swift.generate.engine import TextEngine
from swift.generate.programs import Until, decoded
from swift.generate.request import GREEDY, Answer, Request, Sampling

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm
except ImportError:  # reported by the constructor of EngineLM
    TemplateLM = object

_KNOWN = ("do_sample", "max_gen_toks", "temperature", "top_k", "top_p", "until")


class EngineLM(TemplateLM):
    """Model for ``lm_eval.simple_evaluate`` that runs on a generation engine.

    All requests of a call are submitted at once, so that common prefixes are computed once. Nothing else may use the
    engine while lm-eval runs.

    Args:
        engine: engine that answers the requests.
        tokenizer: tokenizer of the model.

    Raises:
        SettingError: lm-eval is not installed.
    """

    def __init__(self, engine: TextEngine, tokenizer: Tokenizer):
        if TemplateLM is object:
            raise SettingError("EngineLM", "lm-eval", "needs the extra 'eval': pip install 'swift-moe[eval]'")
        super().__init__()
        self._engine, self._texts = engine, tokenizer

    @property
    def eot_token_id(self) -> int:
        """Token that ends a document."""
        return self._texts.separator

    @property
    def prefix_token_id(self) -> int:
        """Token to prepend to a text without context: ``begin_of_prompt``, or the separator if there is none."""
        return prompt_tokens(self._texts, "")[0]

    @property
    def max_length(self) -> int:
        """Number of positions in the model."""
        return self._engine.gpt.config.sequence_length

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer in lm-eval's caches."""
        return repr(self._texts)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokenizes a text and prepends ``begin_of_prompt``, if the tokenizer has it.

        Args:
            string: text to tokenize.
            add_special_tokens: whether to prepend ``begin_of_prompt``; None to do so unless the text already begins
                with it.
        """
        tokens, begin = [int(token) for token in self._texts.encode(string)], text_tokens(self._texts, "")
        is_there = add_special_tokens is None and tokens[: len(begin)] == begin
        return tokens if add_special_tokens is False or is_there else begin + tokens

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continues each text up to a stop text, a separator, or the maximum number of tokens."""
        asked = [self._continuing(number, *request.args) for number, request in enumerate(requests)]
        answers = self._answers([request for request, _ in asked], "generate_until", disable_tqdm)
        texts = []
        for request, (_, stops), answer in zip(requests, asked, answers, strict=True):
            tokens = [token for token in answer.tokens if token != self.eot_token_id]
            texts.append(before_stops(decoded(self._texts, tokens, answer.request.tokens), stops))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Computes each text's log-probability; long texts are scored in windows that fit the model's positions."""
        owners, pairs = [], []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
            for before, scored in map(make_disjoint_window, windows):
                owners.append(number)
                pairs.append((before, scored))
        sums = [0.0] * len(requests)
        for number, (log_prob, _) in zip(
            owners, self._scores(pairs, "loglikelihood_rolling", disable_tqdm), strict=True
        ):
            sums[number] += log_prob
        for request, log_prob in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, log_prob)
        return sums

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_others: Any
    ) -> list[tuple[float, bool]]:
        """Scores each continuation: returns (log-probability, whether every token is the likeliest one)."""
        scores = self._scores([(before, scored) for _, before, scored in requests], "loglikelihood", disable_tqdm)
        for (texts, _, _), score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, score)
        return scores

    def _scores(
        self, pairs: Sequence[tuple[list[int], list[int]]], name: str, is_quiet: bool
    ) -> list[tuple[float, bool]]:
        continuations = [seen([*before, *scored], len(before), self.max_length) for before, scored in pairs]
        for continuation, (_, scored) in zip(continuations, pairs, strict=True):
            if scored and continuation is None:
                allowed = f"must be at most {self.max_length}, the positions of the model"
                raise SettingError("tokens of a continuation", len(scored), allowed)
        requests = [continuation.request for continuation in continuations if continuation is not None]
        answers = iter(self._answers(requests, name, is_quiet))
        return [(0.0, True) if continuation is None else _score(next(answers)) for continuation in continuations]

    def _continuing(self, number: int, text: str, settings: Mapping[str, Any]) -> tuple[Request, list[str]]:
        """Returns (request that continues a text, its stop texts)."""
        known: dict[str, Any] = dict(normalize_gen_kwargs(dict(settings)))
        unknown = next((name for name in known if name not in _KNOWN), None)
        if unknown is not None:
            raise SettingError(f"gen_kwargs.{unknown}", known[unknown], f"is not known; there are {', '.join(_KNOWN)}")
        tokens = self.tok_encode(text) or [self.eot_token_id]
        sampling = GREEDY
        if known.get("temperature"):
            top_k = int(known.get("top_k") or 0)
            top_k = top_k if top_k > 0 else self._engine.gpt.vocab_size
            sampling = Sampling(float(known["temperature"]), top_k, float(known.get("top_p", 1.0)), stream=number)
        stops = [stop for stop in known["until"] if stop]
        until = Until(self._texts, tokens, stops, self._engine.gpt.vocab_size) if stops else None
        end = frozenset({self.eot_token_id})
        return Request(tokens[-self.max_length :], known["max_gen_toks"], sampling, end, until), stops

    def _answers(self, requests: Sequence[Request], name: str, is_quiet: bool) -> list[Answer]:
        """Runs the engine until all requests are answered, with a progress bar like that of lm-eval."""
        answers: list[Answer] = []
        try:
            answers += map(self._engine.submit, requests)
            with tqdm(total=len(answers), desc=f"Running {name} requests", disable=is_quiet) as bar:
                while not self._engine.is_idle:
                    self._engine.step()
                    bar.update(len(answers) - self._engine.num_unanswered - bar.n)
        finally:
            for answer in answers:
                self._engine.cancel(answer)
        failed = next((answer.error for answer in answers if answer.error is not None), None)
        if failed is not None:
            raise failed
        return answers


def _score(answer: Answer) -> tuple[float, bool]:
    return float(answer.text_log_probs.sum()), bool(answer.is_likeliest.all())
