"""Results of an evaluation of models: judgements, scores with intervals, and differences between two models."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from swift.evaluate.intervals import Interval, difference_interval, share_interval


@dataclass(frozen=True)
class Judgement:
    """A model's answer to a question.

    Attributes:
        line: line of the question in the task file.
        task: name of its task.
        correct: whether it is right, by name of the score.
        log_probs: log-probability of each choice; None where there are no choices.
        text: text with which the model continued; None where there are choices.
        unseen_tokens: first tokens of the question that the model did not see, since it has too few positions.
        name: the question's own ``id``.
    """

    line: int
    task: str
    correct: Mapping[str, bool]
    log_probs: tuple[float, ...] | None = None
    text: str | None = None
    unseen_tokens: int = 0
    name: str | int | None = None


@dataclass(frozen=True)
class Score:
    """The share of a task's questions that a model has answered correctly.

    Attributes:
        task: name of the task.
        metric: ``accuracy`` (the choice with the largest log-probability), ``accuracy_per_byte`` (the largest one for
            each byte of the choice), or ``match``.
        correct: questions that were answered correctly.
        questions: questions that were answered.
    """

    task: str
    metric: str
    correct: int
    questions: int

    @property
    def share(self) -> float:
        """Correct answers for each question."""
        return self.correct / self.questions

    @property
    def interval(self) -> Interval:
        """95 % confidence interval of the share."""
        return share_interval(self.correct, self.questions)


@dataclass(frozen=True)
class Evaluation:
    """A model's answers to the questions of a task file.

    Attributes:
        model: name of the model.
        path: directory of the run or the model.
        step: iteration of the checkpoint; None for a model directory.
        weights: SHA-256 of all weights.
        tasks: name of the task file.
        tasks_digest: SHA-256 of its content.
        num_questions: its questions.
        seconds: time in which they were answered.
        judgements: answers, in the order of their lines.
    """

    model: str
    path: str
    step: int | None
    weights: str
    tasks: str
    tasks_digest: str
    num_questions: int
    seconds: float
    judgements: tuple[Judgement, ...]

    @property
    def is_complete(self) -> bool:
        """Whether every question is answered."""
        return len(self.judgements) == self.num_questions

    @property
    def num_cut(self) -> int:
        """Questions of which the model did not see the beginning."""
        return sum(judgement.unseen_tokens > 0 for judgement in self.judgements)

    @property
    def scores(self) -> list[Score]:
        """A score for every task and metric, in the order of the tasks."""
        counts: dict[tuple[str, str], list[bool]] = defaultdict(list)
        for judgement in self.judgements:
            for metric, is_correct in judgement.correct.items():
                counts[judgement.task, metric].append(is_correct)
        tasks = list(dict.fromkeys(task for task, _ in counts))
        ordered = sorted(counts, key=lambda key: tasks.index(key[0]))
        return [Score(*key, sum(counts[key]), len(counts[key])) for key in ordered]


@dataclass(frozen=True)
class Difference:
    """Difference in how often two models are right, over the questions that both have answered.

    Attributes:
        task: name of the task.
        metric: see ``Score``.
        both: questions that both have answered correctly.
        only_first: those that only the one has.
        only_second: those that only the other has.
        neither: those that neither has.
    """

    task: str
    metric: str
    both: int
    only_first: int
    only_second: int
    neither: int

    @property
    def questions(self) -> int:
        """Questions that both have answered."""
        return self.both + self.only_first + self.only_second + self.neither

    @property
    def share(self) -> float:
        """The one's share of correct answers less the other's."""
        return (self.only_first - self.only_second) / self.questions

    @property
    def interval(self) -> Interval:
        """95 % confidence interval of the difference."""
        return difference_interval(self.both, self.only_first, self.only_second, self.neither)


def differences(one: Evaluation, other: Evaluation) -> Iterator[Difference]:
    """Compares two models question by question.

    Args:
        one: answers of a model.
        other: answers of another model to the same task file.

    Yields:
        A difference for every task and metric of which both have answered a question.
    """
    assert one.tasks_digest == other.tasks_digest, "answers to other questions"
    theirs = {judgement.line: judgement for judgement in other.judgements}
    for score in one.scores:
        pairs = [
            (mine.correct[score.metric], theirs[mine.line].correct[score.metric])
            for mine in one.judgements
            if mine.task == score.task and mine.line in theirs
        ]
        if pairs:
            counts = [pairs.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False))]
            yield Difference(score.task, score.metric, *counts)
