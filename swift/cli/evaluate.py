"""``swift evaluate``: asks one or more models the questions in a task file, one model after another.

Results are saved as they arrive, in one file per model or in a single file; tables of scores are printed on stdout.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console, RenderableType

from swift.cli.generate import prepare_engine
from swift.cli.stored_model import StoredModel, find_model
from swift.cli.values import RESULTS, check_output
from swift.errors import RunError, SettingError, printable
from swift.evaluate.results import (
    DIRECTORY,
    Difference,
    Evaluation,
    Judgement,
    Score,
    differences,
    document_of,
    read_evaluations,
    write_evaluations,
)
from swift.evaluate.scoring import ask, prepare_questions
from swift.evaluate.tasks import TaskFile, read_tasks
from swift.generate.engine import TextEngine, TextEngineConfig
from swift.models.gpt import GPT, Weights
from swift.terminal_table import TerminalTable
from swift.train.display import StepTimer, Terminal, progress_lines
from swift.train.interrupt import Interrupt
from swift.train.model_directory import weights_digest, widened

_TEXTS = ("task", "score")

_MOST_MISTAKES = 20
"""Maximum number of invalid lines of a task file to print."""
_WRITTEN_EVERY_S = 60.0


class _ResultsFiles:
    """The results of several models, and the files in which they are saved.

    Args:
        tasks: questions to ask.
        task_path: path of the task file.
        models: models to ask, in this order.
        out: file for all results, or None for one file in the directory of each model.

    Attributes:
        titles: display name of each model, see ``_titles``.
    """

    def __init__(self, tasks: TaskFile, task_path: Path, models: Sequence[StoredModel], out: Path | None):
        self._tasks, self._task_path, self._models, self._out = tasks, task_path, models, out
        self.titles = _titles([model.path for model in models])
        self._paths: list[Path] = []
        self._kept: dict[int, Evaluation] = {}

    def locate(self, *, resume: bool) -> None:
        """Finds the checkpoints of the models and the result files, and reads earlier results.

        Args:
            resume: whether to continue from earlier results.

        Raises:
            SettingError: a checkpoint cannot be read, or a file cannot be written or continued.
        """
        for model in self._models:
            self._paths.append(self._out or model.path / DIRECTORY / f"{_stem(self._tasks.name, model.step)}.json")
        for path in dict.fromkeys(self._paths):
            parent = path.parent if path.parent.exists() or self._out else path.parent.parent
            if path.is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK):
                allowed = "cannot be written" if self._out else "cannot be written: name another file with --out"
                raise SettingError("--out" if self._out else "results", str(path), allowed)
            if os.path.lexists(path):
                check_output("--out" if self._out else "results", path, RESULTS, inputs=[self._task_path])
            if resume and path.exists():
                self._take(path)

    def _take(self, path: Path) -> None:
        previous = {(evaluation.path, evaluation.step): evaluation for evaluation in read_evaluations(path)}
        for number, model in enumerate(self._models):
            evaluation = previous.get((str(model.path.resolve()), model.step)) if self._paths[number] == path else None
            if evaluation is None:
                continue
            if evaluation.tasks_digest != self._tasks.digest:
                raise SettingError("--resume", str(path), "has answers to other questions; leave it out to begin anew")
            self._kept[number] = evaluation

    def begin(self, number: int, weights: str) -> Evaluation:
        """Returns a model's earlier results, or empty results if it has none.

        Raises:
            SettingError: the earlier results are from other weights.
        """
        model = self._models[number]
        if number not in self._kept:
            path, tasks = str(model.path.resolve()), self._tasks
            facts = weights, tasks.name, tasks.digest, len(tasks.questions)
            return self._kept.setdefault(number, Evaluation(self.titles[number], path, model.step, *facts, 0.0, ()))
        if self._kept[number].weights != weights:
            path = str(self._paths[number])
            raise SettingError("--resume", path, "has answers of other weights; leave it out to begin anew")
        return self._kept[number]

    def keep(self, number: int, judgements: Sequence[Judgement], seconds: float) -> None:
        """Saves a model's results so far; writes no file if there are none.

        Args:
            number: index of the model.
            judgements: all its judgements so far, in any order.
            seconds: total time spent on the model, including earlier invocations.

        Raises:
            RunError: the file cannot be written.
        """
        ordered = tuple(sorted(judgements, key=lambda judgement: judgement.line))
        self._kept[number] = replace(self._kept[number], judgements=ordered, seconds=round(seconds, 3))
        path = self._paths[number]
        if not judgements:
            return
        try:
            write_evaluations(path, [self._kept[number]] if self._out is None else self.evaluations)
        except OSError as error:
            raise RunError(f"{path}: the results cannot be written: {error.strerror}") from error

    @property
    def evaluations(self) -> list[Evaluation]:
        """Results for the models that were asked so far, in the order of ``models``."""
        return [self._kept[number] for number in sorted(self._kept)]

    def lines(self) -> list[str]:
        """Returns lines that name the result files, and warn of questions that were truncated to fit the model."""
        lines = [f"results: {path}" for path in dict.fromkeys(self._paths)]
        for evaluation in self.evaluations:
            if evaluation.num_cut:
                cut = f"{evaluation.num_cut:,} of {evaluation.num_questions:,} questions are longer than its positions"
                lines.append(f"{evaluation.model}: {cut}; it has seen their ends")
        return lines


def _stem(name: str, step: int | None) -> str:
    return name.lstrip(".") + ("" if step is None else f"-{step}")


def _titles(paths: Sequence[Path]) -> list[str]:
    """Returns a title for each model: the name of its directory, or its path if several directories share the name."""
    names = [path.resolve().name for path in paths]
    return [name if names.count(name) == 1 else str(path) for path, name in zip(paths, names, strict=True)]


def _scores_tables(evaluations: Sequence[Evaluation]) -> Iterator[TerminalTable]:
    """Yields a table of scores with a column per model; for several models, also their differences from the first.

    Args:
        evaluations: results of the models on the same task file.
    """
    first, *rest = evaluations
    scores = [{(score.task, score.metric): score for score in evaluation.scores} for evaluation in evaluations]
    table = TerminalTable([*_TEXTS, "questions", *(evaluation.model for evaluation in evaluations)], _TEXTS)
    for key, score in scores[0].items():
        shares = [_share(model_scores[key]) if key in model_scores else "-" for model_scores in scores]
        table.add_row(*key, f"{score.questions:,}", *shares)
    yield table
    if rest:
        table = TerminalTable([*_TEXTS, *(f"{evaluation.model} less {first.model}" for evaluation in rest)], _TEXTS)
        pairs = [
            {(difference.task, difference.metric): difference for difference in differences(evaluation, first)}
            for evaluation in rest
        ]
        for key in scores[0]:
            table.add_row(*key, *(_share(by_key[key], "+") if key in by_key else "-" for by_key in pairs))
        yield table


def _share(estimate: Score | Difference, sign: str = "") -> str:
    """Formats a share in percent, with its 95 % confidence interval."""
    low, high = estimate.interval
    return f"{100 * estimate.share:{sign}.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def evaluate(options: argparse.Namespace) -> None:
    """Runs ``swift evaluate DIR ... --tasks TASKS.jsonl``."""
    tasks = _read(options.tasks)
    models = [find_model(path, "DIR", options.config, options.step) for path in options.models]
    files = _ResultsFiles(tasks, options.tasks, models, options.out)
    prepare_engine(options.expert_ranks, [model.experiment for model in models])
    config = TextEngineConfig(expert_ranks=options.expert_ranks)
    files.locate(resume=options.resume)
    with Interrupt(answer=_say_stopping).hold() as interrupt:
        for number, model in enumerate(models):
            _evaluate(tasks, options.tasks, model, config, number, files, interrupt)
    evaluations = files.evaluations
    if options.format == "json":
        print(json.dumps(document_of(evaluations, with_answers=False)))
        return
    console = Console()
    for table in _scores_tables(evaluations):
        console.print(table)
    for line in files.lines():
        print(line)


def _say_stopping() -> None:
    print("swift: stopping; --resume continues; a second Ctrl-C ends at once", file=sys.stderr)


def _read(path: Path) -> TaskFile:
    """Reads the questions; if lines are invalid, prints up to 20 of them and raises SettingError."""
    tasks, mistakes = read_tasks(path)
    if len(mistakes) == 1:
        raise mistakes[0]
    if mistakes:
        for mistake in mistakes[:_MOST_MISTAKES]:
            print(f"swift: {printable(str(mistake))}", file=sys.stderr)
        raise SettingError("--tasks", str(path), f"has {len(mistakes)} lines that are wrong")
    return tasks


def _evaluate(
    tasks: TaskFile,
    path: Path,
    model: StoredModel,
    config: TextEngineConfig,
    number: int,
    files: _ResultsFiles,
    interrupt: Interrupt,
) -> None:
    """Asks a model the questions it has not answered yet; saves the results once a minute and at the end."""
    with _Progress(files.titles[number], len(tasks.questions)) as progress:
        gpt, weights = _load(model)
        evaluation = files.begin(number, weights_digest(weights))
        interrupt.check()
        known = {judgement.line for judgement in evaluation.judgements}
        missing = [question for question in tasks.questions if question.line not in known]
        engine, tokenizer = TextEngine(gpt, model.experiment.experts, weights, config), model.experiment.data.tokenizer
        del weights  # frees the host memory: the engine has its own copy on the devices
        prompts = prepare_questions(engine, tokenizer, str(path), missing)
        progress.begin(len(known))
        began = written = time.monotonic()
        judgements = list(evaluation.judgements)

        def keep() -> None:
            files.keep(number, judgements, evaluation.seconds + time.monotonic() - began)

        try:
            for new_judgements in ask(engine, tokenizer, prompts) if prompts else ():
                judgements += new_judgements
                if new_judgements:
                    progress.update(len(judgements), engine)
                if time.monotonic() - written > _WRITTEN_EVERY_S:
                    keep()
                    written = time.monotonic()
                interrupt.check()
        finally:
            keep()


def _load(model: StoredModel) -> tuple[GPT, Weights]:
    """Loads a model to the host, with weights in the type of master weights, and without document boundaries."""
    experiment = model.experiment
    _, weights = model.load()
    gpt = GPT(experiment.model, experiment.vocab_size, experiment.experts.num_classes, router=experiment.experts.router)
    return gpt, widened(experiment, weights)


class _Progress:
    """A context manager that shows progress on stderr: a bar on a terminal, about ten lines elsewhere."""

    def __init__(self, title: str, count: int):
        self._title, self._count, self._done, self._parts = title, count, 0, ["loads the model"]
        self._timer, self._terminal = StepTimer(count), Terminal(self._draw)

    def __enter__(self) -> "_Progress":
        self._terminal.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._terminal.is_transient = True
        self._terminal.__exit__(None, None, None)

    def begin(self, done: int) -> None:
        """Shows that the model is loaded, and how many questions an earlier invocation answered."""
        self._done, self._parts = done, ["waiting for the first answer, which compiles"]
        if not self._terminal.is_live:
            before = f", {done:,} of them answered before" if done else ""
            self._terminal.print(f"{self._title}: {self._count:,} questions{before}")

    def update(self, done: int, engine: TextEngine) -> None:
        """Shows how many questions are answered, and how many tokens the engine has read and written."""
        is_due = self._timer.passed(done, time.monotonic())
        computed = engine.computed
        self._done, self._parts = done, [f"{computed.prompt_tokens:,} tokens read, {computed.new_tokens:,} written"]
        if is_due and not self._terminal.is_live:
            parts = [f"{self._title}: {done:,}/{self._count:,}", *self._parts, self._timer.left()]
            self._terminal.print("  ".join(filter(None, parts)))

    def _draw(self) -> RenderableType:
        return progress_lines(self._title, self._done, self._count, self._timer.left(), self._parts)
