"""``swift evaluate``: models asked the questions of a file, one model after the other."""

import argparse
import json
import sys
import time
from pathlib import Path

from rich.console import Console, RenderableType

from swift.cli.models.expert_ranks import prepare_engine
from swift.cli.models.results_files import ResultsFiles
from swift.cli.models.scores_table import scores_tables
from swift.cli.models.stored_model import StoredModel, find_model
from swift.errors import SettingError, printable
from swift.evaluate.asking.asking import ask, prepare_questions
from swift.evaluate.documents import document_of
from swift.evaluate.task_files import TaskFile, read_tasks
from swift.generate.engine import TextEngine, TextEngineConfig
from swift.models.gpt import GPT, Weights
from swift.train.checkpoints.model_directory import weights_digest, widened
from swift.train.display.progress import progress_lines
from swift.train.display.step_timer import StepTimer
from swift.train.display.terminal import Terminal
from swift.train.interrupt import Interrupt

_MOST_MISTAKES = 20
"""Lines of a task file that are named at most."""
_WRITTEN_EVERY_S = 60.0


def evaluate(options: argparse.Namespace) -> None:
    """``swift evaluate DIR ... --tasks TASKS.jsonl``."""
    tasks = _read(options.tasks)
    models = [find_model(path, "DIR", options.config, options.step) for path in options.models]
    files = ResultsFiles(tasks, options.tasks, models, options.out)
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
    for table in scores_tables(evaluations):
        console.print(table)
    for line in files.lines():
        print(line)


def _say_stopping() -> None:
    print("swift: stopping; --resume continues; a second Ctrl-C ends at once", file=sys.stderr)


def _read(path: Path) -> TaskFile:
    """Reads the questions; names every line that is wrong."""
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
    files: ResultsFiles,
    interrupt: Interrupt,
) -> None:
    """Asks a model what it has not answered yet."""
    with _Progress(files.titles[number], len(tasks.questions)) as progress:
        gpt, weights = _load(model)
        evaluation = files.begin(number, weights_digest(weights))
        interrupt.check()
        known = {judgement.line for judgement in evaluation.judgements}
        missing = [question for question in tasks.questions if question.line not in known]
        engine, tokenizer = TextEngine(gpt, model.experiment.experts, weights, config), model.experiment.data.tokenizer
        del weights  # the engine has them on its devices
        asked = prepare_questions(engine, tokenizer, str(path), missing)
        progress.begin(len(known))
        began = written = time.monotonic()
        judgements = list(evaluation.judgements)

        def keep() -> None:
            files.keep(number, judgements, evaluation.seconds + time.monotonic() - began)

        try:
            for found in ask(engine, tokenizer, asked) if asked else ():
                judgements += found
                if found:
                    progress.update(len(judgements), engine)
                if time.monotonic() - written > _WRITTEN_EVERY_S:
                    keep()
                    written = time.monotonic()
                interrupt.check()
        finally:
            keep()


def _load(model: StoredModel) -> tuple[GPT, Weights]:
    """Reads a model to the host, in the type of master weights; no document is told apart from others."""
    experiment = model.experiment
    _, weights = model.load()
    gpt = GPT(experiment.model, experiment.vocab_size, experiment.experts.num_classes)
    return gpt, widened(experiment, weights)


class _Progress:
    """Questions answered so far, on stderr: a bar on a terminal, about ten lines elsewhere; a context manager."""

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
        """Notes that the model is loaded, and how many questions it has answered before."""
        self._done, self._parts = done, ["waiting for the first answer, which compiles"]
        if not self._terminal.is_live:
            before = f", {done:,} of them answered before" if done else ""
            self._terminal.print(f"{self._title}: {self._count:,} questions{before}")

    def update(self, done: int, engine: TextEngine) -> None:
        """Shows the questions that are answered."""
        is_due = self._timer.passed(done, time.monotonic())
        computed = engine.computed
        self._done, self._parts = done, [f"{computed.prompt_tokens:,} tokens read, {computed.new_tokens:,} written"]
        if is_due and not self._terminal.is_live:
            parts = [f"{self._title}: {done:,}/{self._count:,}", *self._parts, self._timer.left()]
            self._terminal.print("  ".join(filter(None, parts)))

    def _draw(self) -> RenderableType:
        return progress_lines(self._title, self._done, self._count, self._timer.left(), self._parts)
