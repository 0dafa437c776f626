"""Files of the results of an evaluation: one with each model, or a single one."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from swift.cli.models.stored_model import StoredModel
from swift.cli.options.outputs import RESULTS, check_output
from swift.errors import RunError, SettingError
from swift.evaluate.documents import DIRECTORY, read_evaluations, write_evaluations
from swift.evaluate.results import Evaluation, Judgement
from swift.evaluate.task_files import TaskFile


class ResultsFiles:
    """Results of several models, and their files.

    Args:
        tasks: the questions.
        task_path: their file.
        models: models that are asked.
        out: file of all results; None: one in the directory of each model.

    Attributes:
        titles: name of each model.
    """

    def __init__(self, tasks: TaskFile, task_path: Path, models: Sequence[StoredModel], out: Path | None):
        self._tasks, self._task_path, self._models, self._out = tasks, task_path, models, out
        self.titles = _titles([model.path for model in models])
        self._paths: list[Path] = []
        self._kept: dict[int, Evaluation] = {}

    def locate(self, *, resume: bool) -> None:
        """Finds the models' checkpoints and the files, and reads what was kept before.

        Args:
            resume: whether to continue that.

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
        before = {(one.path, one.step): one for one in read_evaluations(path)}
        for number, model in enumerate(self._models):
            one = before.get((str(model.path.resolve()), model.step)) if self._paths[number] == path else None
            if one is None:
                continue
            if one.tasks_digest != self._tasks.digest:
                raise SettingError("--resume", str(path), "has answers to other questions; leave it out to begin anew")
            self._kept[number] = one

    def begin(self, number: int, weights: str) -> Evaluation:
        """Tells what a model has answered before.

        Raises:
            SettingError: that was with other weights.
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
        """Writes what a model has answered so far, unless that is nothing.

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
        """Results of each model that was asked, in their order."""
        return [self._kept[number] for number in sorted(self._kept)]

    def lines(self) -> list[str]:
        """Names the files, and what a reader of the scores should know."""
        lines = [f"results: {path}" for path in dict.fromkeys(self._paths)]
        for one in self.evaluations:
            if one.num_cut:
                cut = f"{one.num_cut:,} of {one.num_questions:,} questions are longer than its positions"
                lines.append(f"{one.model}: {cut}; it has seen their ends")
        return lines


def _stem(name: str, step: int | None) -> str:
    return name.lstrip(".") + ("" if step is None else f"-{step}")


def _titles(paths: Sequence[Path]) -> list[str]:
    """Names models by their directories, with their paths if several share a name."""
    names = [path.resolve().name for path in paths]
    return [name if names.count(name) == 1 else str(path) for path, name in zip(paths, names, strict=True)]
