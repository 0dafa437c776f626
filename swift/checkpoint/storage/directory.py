"""The directory of a run's checkpoints: listing, committing, retiring, and cleaning up after interrupted saves.

    step-00000040/manifest.json    written last: makes the iteration restorable, see swift.checkpoint.storage.manifest
    step-00000040/arrays/          arrays saved at iteration 40, see swift.checkpoint.storage.orbax_files
    step-00000020/arrays/          without a manifest: experts whose newest copy, or the one before, is of iteration 20
    .step-00000060.tmp/            a save in progress, or an interrupted one
    .step-00000060.5f0c.hosts.tmp/ what hosts that save together tell each other, see swift.checkpoint.hosts
    step-00000040.earlier/         a checkpoint while another of the same iteration replaces it
    step-00000060.aside/           a checkpoint that a restore has passed over; it is never read again, and removed once
                                   the run has saved iteration 60 or a later one

One process at a time writes here, but for the files in a save that several hosts fill in together.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

from swift.checkpoint.storage.manifest import MANIFEST, Manifest, read_manifest
from swift.errors import SettingError
from swift.files import sync_directory

ARRAYS = "arrays"
_PREFIX, _EARLIER, _ASIDE = "step-", ".earlier", ".aside"


def checkpoint_steps(directory: Path) -> list[int]:
    """The iterations that can be restored, oldest first."""
    return [step for step in _saved_steps(directory) if (checkpoint_path(directory, step) / MANIFEST).is_file()]


def committed_steps(directory: Path) -> list[int]:
    """The iterations that can be restored, and those that have lost their manifests, oldest first.

    Removal takes manifests oldest first, so an iteration without one that is newer than the oldest checkpoint has lost
    it, as have all where no checkpoint is left.
    """
    saved, restorable = _saved_steps(directory), checkpoint_steps(directory)
    return [step for step in saved if not restorable or step >= restorable[0]]


def checkpoint_path(directory: Path, step: int) -> Path:
    """The path of an iteration's checkpoint."""
    return directory / f"{_PREFIX}{step:08d}"


def clean_up_saves(directory: Path, kept: Path | None = None) -> None:
    """Cleans up after interrupted saves: removes what they wrote, and puts back the checkpoints they were replacing.

    Unfinished saves would keep a full disk full.

    Args:
        directory: directory of all checkpoints.
        kept: directory that is not removed, in which several hosts tell each other about a save.
    """
    for half in directory.glob(f".{_PREFIX}*.tmp"):
        if half != kept:
            shutil.rmtree(half, ignore_errors=True)
    for earlier in directory.glob(f"{_PREFIX}*{_EARLIER}"):
        path = earlier.with_suffix("")
        if path.exists():
            shutil.rmtree(earlier, ignore_errors=True)
        else:
            earlier.rename(path)


def begin_save(directory: Path, step: int, kept: Path | None = None) -> Path:
    """Creates the temporary directory of a save, which ``commit_save`` renames; ``kept`` as in ``clean_up_saves``."""
    directory.mkdir(parents=True, exist_ok=True)
    clean_up_saves(directory, kept)
    path = temporary_path(directory, step)
    path.mkdir()
    return path


def temporary_path(directory: Path, step: int) -> Path:
    """The path of the directory that ``begin_save`` creates."""
    return directory / f".{checkpoint_path(directory, step).name}.tmp"


def commit_save(directory: Path, step: int) -> Path:
    """Renames the directory of ``begin_save``; an earlier checkpoint of the iteration remains until that is done."""
    path = checkpoint_path(directory, step)
    if path.exists():
        path.rename(path.with_suffix(_EARLIER))
    temporary_path(directory, step).rename(path)
    sync_directory(directory)  # before the checkpoint that this one replaces is removed
    clean_up_saves(directory)
    return path


def set_aside_newer(directory: Path, step: int) -> list[str]:
    """Sets aside the checkpoints of iterations after ``step``, from which a run resumes: they would shadow new ones.

    Returns:
        Their new names.
    """
    names = []
    for newer in _saved_steps(directory):
        if newer > step:
            path = checkpoint_path(directory, newer)
            aside = path.with_suffix(_ASIDE)
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            names.append(aside.name)
    return names


def remove_set_aside(directory: Path, step: int) -> None:
    """Removes checkpoints set aside, up to an iteration that has been saved and read back since."""
    for path in directory.glob(f"{_PREFIX}*{_ASIDE}"):
        number = path.name.removeprefix(_PREFIX).removesuffix(_ASIDE)
        if number.isdigit() and int(number) <= step:
            shutil.rmtree(path)


def retire(directory: Path, num_kept: int) -> None:
    """Removes files that no kept checkpoint needs; removes nothing if the manifest of a kept one cannot be read.

    Args:
        directory: directory of all checkpoints of a run.
        num_kept: number of checkpoints to keep, the newest ones.
    """
    steps = checkpoint_steps(directory)
    try:
        kept = [read_manifest(checkpoint_path(directory, step), "checkpoint") for step in steps[-num_kept:]]
    except SettingError:
        return  # it is unknown which files that checkpoint needs
    for step in steps[:-num_kept]:  # manifests first, so that a checkpoint that is half removed does not count
        (checkpoint_path(directory, step) / MANIFEST).unlink()
    needed = files_needed(kept)
    for step in _saved_steps(directory):
        _keep_only(checkpoint_path(directory, step), needed.get(step, frozenset()))


def files_needed(manifests: list[Manifest]) -> dict[int, frozenset[str]]:
    """The files that restores of some checkpoints may read, by step, manifests included."""
    needed: dict[int, set[str]] = {}
    for manifest in manifests:
        for step, files in manifest.files_needed().items():
            needed.setdefault(step, set()).update(files)
        needed[manifest.step].add(MANIFEST)
    return {step: frozenset(files) for step, files in needed.items()}


def _keep_only(path: Path, names: frozenset[str]) -> None:
    """Removes all other files of a directory, and directories that become empty."""
    if not names:
        shutil.rmtree(path)
        return
    for below in sorted(path.rglob("*"), reverse=True):
        if below.is_dir():
            if not any(below.iterdir()):
                below.rmdir()
        elif below.relative_to(path).as_posix() not in names:
            below.unlink()


def _saved_steps(directory: Path) -> list[int]:
    """The iterations with any files, oldest first."""
    return sorted(_numbers(directory))


def _numbers(directory: Path) -> Iterator[int]:
    for path in directory.glob(f"{_PREFIX}*") if directory.is_dir() else ():
        number = path.name.removeprefix(_PREFIX)
        if number.isdigit():
            yield int(number)
