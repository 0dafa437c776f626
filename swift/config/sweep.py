"""The runs of a comparison: every file with every combination of the values of ``--vary`` and ``--seeds``."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, product
from pathlib import Path

from swift.config.bindings import Binding, parse_override
from swift.config.experiment import Experiment
from swift.config.gin_reader import load_experiment
from swift.config.stored import config_text
from swift.errors import SettingError, check_seed, renamed_settings
from swift.typed import SourceText

_SEED = "Experiment.seed"
_MOST_RUNS = 10_000
_MOST_LETTERS, _DIGEST = 40, 6
"""Letters of a value in the name of a run, and of the digest that tells two long values apart."""
_MOST_BYTES = 200
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class ComparedRun:
    """A run of a comparison, before it begins.

    Attributes:
        name: name of its directory, such as ``demo,peak_learning_rate=0.0003,seed=1``; unique in the comparison.
        config: gin file.
        overrides: overrides ``NAME=VALUE``, as for ``load_experiment``.
        experiment: settings of the run.
    """

    name: str
    config: Path
    overrides: tuple[str, ...]
    experiment: Experiment


def compared_runs(
    configs: Sequence[Path], overrides: Sequence[str], vary: Sequence[str] = (), seeds: str | None = None
) -> list[ComparedRun]:
    """Reads the experiments of a comparison; in their order, the last varied setting changes fastest.

    Args:
        configs: gin files.
        overrides: overrides that all runs have.
        vary: texts ``NAME=VALUE,VALUE,...``; commas within brackets and quotation marks belong to a value.
        seeds: seeds such as ``0-4`` or ``0,3,10-12``; None to keep the seed of each file.

    Raises:
        SettingError: a text cannot be read, a run cannot work, or two runs of a file would be the same.
    """
    stems = [path.stem for path in configs]
    if len(set(stems)) < len(stems):
        raise SettingError("CONFIG", stems, "the files need different names, which their runs will have")
    varied = _varied(overrides, vary, seeds)
    num_runs = len(configs)
    for values in varied.values():
        num_runs *= len(values)
    if num_runs > _MOST_RUNS:
        raise SettingError("--vary", SourceText(f"({num_runs:,} runs)"), f"must make at most {_MOST_RUNS:,} runs")
    runs = []
    for path in configs:
        names_by_text = dict[str, str]()
        for combination in product(*varied.values()):
            name = _cut(",".join([path.stem, *(label for label, _ in combination)]))
            texts = (*overrides, *(override for _, override in combination))
            run = ComparedRun(name, path, texts, load_experiment(path, texts))
            other = names_by_text.setdefault(config_text(run.experiment), name)
            if other != name:
                allowed = f"{other} and {name} would have the same settings"
                raise SettingError("--vary", SourceText(" ".join(varied)), allowed)
            runs.append(run)
    return runs


def _cut(name: str) -> str:
    """Shortens a name that would be too long for a file, beside what is added to it; a digest tells two apart."""
    if len(name.encode()) <= _MOST_BYTES:
        return name
    digest = sha256(name.encode()).hexdigest()[:_DIGEST]
    return f"{name.encode()[: _MOST_BYTES - _DIGEST - 1].decode(errors='ignore')}-{digest}"


def _varied(overrides: Sequence[str], vary: Sequence[str], seeds: str | None) -> dict[str, list[tuple[str, str]]]:
    """Returns (label, override) for each value of each varied setting."""
    bindings = dict[str, list[Binding]]()
    with renamed_settings({"--set": "--vary"}):
        for text in vary:
            name, equals, values = text.partition("=")
            parsed = [parse_override(f"{name}{equals}{value}") for value in _split(text, values)]
            if len({repr(binding.value) for binding in parsed}) < len(parsed):
                raise SettingError("--vary", text, "has a value twice")
            if parsed[0].setting in bindings:
                raise SettingError("--vary", text, "varies a setting that another --vary varies")
            bindings[parsed[0].setting] = parsed
    if seeds is not None:
        if _SEED in bindings:
            raise SettingError("--seeds", seeds, f"varies {_SEED}, which --vary varies")
        bindings[_SEED] = [parse_override(f"{_SEED}={seed}") for seed in _seeds(seeds)]
    for override in overrides:
        if parse_override(override).setting in bindings:
            raise SettingError("--set", override, "sets a setting that is varied")
    short = {setting: setting.rpartition(".")[2] for setting in bindings}
    count = Counter(short.values())
    return {
        setting: list(_labelled(short[setting] if count[short[setting]] == 1 else setting, parsed))
        for setting, parsed in bindings.items()
    }


def _labelled(name: str, bindings: Sequence[Binding]) -> Iterator[tuple[str, str]]:
    """Yields (label, override) for the values of a setting, for example ``seed=1``."""
    texts = [repr(binding.value) for binding in bindings]  # the same for 1e-4 and 0.0001
    labels = [re.sub(r"[^\w.+-]+", "_", text).strip("_.") for text in texts]
    count = Counter(label[:_MOST_LETTERS] for label in labels)
    for binding, text, label in zip(bindings, texts, labels, strict=True):
        if len(label) > _MOST_LETTERS or count[label] > 1 or not label:
            label = f"{label[:_MOST_LETTERS]}-{sha256(text.encode()).hexdigest()[:_DIGEST]}"
        yield f"{name.replace('/', '.')}={label}", f"{binding.setting}={text}"


def _split(text: str, values: str) -> list[str]:
    """Splits values at commas that are within no brackets or quotation marks.

    >>> _split("", "(1, 2),(3, 4),'a,b'")
    ['(1, 2)', '(3, 4)', "'a,b'"]
    """
    parts, ends, quote = [""], list[str](), ""
    for letter in values:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in _BRACKETS:
            ends.append(_BRACKETS[letter])
        elif ends and letter == ends[-1]:
            ends.pop()
        elif letter == "," and not ends:
            parts.append("")
            continue
        parts[-1] += letter
    if not all(map(str.strip, parts)):
        raise SettingError("--vary", text, "must be NAME=VALUE,VALUE,..., such as OptimizerConfig.clip_norm=0.5,1.0")
    return parts


def _seeds(text: str) -> list[int]:
    """Parses seeds.

    >>> _seeds("0-2,7")
    [0, 1, 2, 7]
    """
    ranges = [re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip()) for part in text.split(",")]
    ends = [(int(match[1]), int(match[2] or match[1])) for match in ranges if match is not None]
    if len(ends) < len(ranges) or any(first > last for first, last in ends):
        raise SettingError("--seeds", text, "must be seeds, such as 0-4 or 0,3,10-12")
    for seed in chain.from_iterable(ends):
        check_seed("--seeds", seed)
    if sum(last - first + 1 for first, last in ends) > _MOST_RUNS:
        raise SettingError("--seeds", text, f"must be at most {_MOST_RUNS:,} seeds")
    seeds = [seed for first, last in ends for seed in range(first, last + 1)]
    if len(set(seeds)) < len(seeds):
        raise SettingError("--seeds", text, "has a seed twice")
    return seeds
