"""The command line of a campaign: `python -m benchmarks.faults`."""

import argparse
import signal
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from .campaign import KINDS, Campaign
from .isolation import isolated
from .place import ROOT, Place
from .record import Record, commit
from .shapes import SHAPES, write_corpus
from .shim import built
from .storage import can_have_disks
from .tasks import can_limit_tasks
from .wire import can_have_networks


def main() -> int:
    options, is_private = _options(), isolated()
    directory = (options.work or Path(tempfile.mkdtemp(prefix="swift-faults-"))).resolve()
    place = replace(_place(directory, options.patience, is_private), root=options.root.resolve())
    told: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: _note(told, number))
    begun = time.monotonic()

    def is_called_off() -> bool:
        late = options.minutes is not None and time.monotonic() - begun > 60 * options.minutes
        enough = options.count is not None and campaign.struck >= options.count
        return bool(told) or late or enough or (options.first_wrong and campaign.wrong > 0)

    record = Record(options.record or directory / "faults.jsonl")
    tell = partial(_tell, begun)
    campaign = Campaign(place, options.kinds, options.shapes, record, commit(options.root), tell, is_called_off)
    tell(f"seed {options.seed}, commit {campaign.commit}, in {directory}")
    tell(_cannot(place))
    seed = record.next_seed(options.seed) if options.resume else options.seed
    if options.tour:
        campaign.tour(seed)
    while not (options.tour or is_called_off()):
        campaign.episode(seed)
        seed += 1
    minutes = (time.monotonic() - begun) / 60
    rate = f"{campaign.struck / minutes:.1f} a minute"
    if campaign.broken:
        print(f"{campaign.broken} episodes could not be carried out")
    print(f"{campaign.struck} faults in {minutes:.1f} min, {rate}; {campaign.wrong} episodes with a wrong verdict")
    return 130 if told else int(campaign.wrong + campaign.broken > 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first episode; the next one has the next seed")
    parser.add_argument("--count", type=int, help="end after so many faults")
    parser.add_argument("--minutes", type=float, help="end after so many minutes")
    parser.add_argument("--tour", action="store_true", help="short runs of all shapes, until each kind has struck once")
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), default=sorted(KINDS), metavar="KIND")
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES), metavar="SHAPE")
    parser.add_argument("--record", type=Path, metavar="FILE", help="add a line for each fault")
    parser.add_argument("--resume", action="store_true", help="begin after the last seed of the record")
    parser.add_argument("--first-wrong", action="store_true", help="end at the first wrong verdict")
    parser.add_argument("--work", type=Path, metavar="DIR", help="for runs, caches and references")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="of the checkout whose code is tried")
    parser.add_argument("--patience", type=float, default=90.0, help="seconds until a run has to be well again")
    return parser.parse_args()


def _place(directory: Path, patience_s: float, is_private: bool) -> Place:
    """Makes what all runs of a campaign share."""
    directory.mkdir(parents=True, exist_ok=True)
    place = Place(directory, write_corpus(directory / "corpus"), directory / "cache", patience_s, is_private)
    has_networks = is_private and can_have_networks(directory)
    return replace(
        place,
        has_disks=is_private and can_have_disks(directory),
        has_networks=has_networks,
        limits_tasks=can_limit_tasks(),
        shim=built(directory),
    )


def _cannot(place: Place) -> str:
    """Lists faults that cannot be tried on this machine."""
    missing = {
        "small-shm, full-shm, full-tmp: not allowed to mount": not place.is_private,
        "full-disk, frozen-disk, lost-disk, cut-power: no loop devices": not place.has_disks,
        "cut-wire, slow-wire: no network namespaces": not place.has_networks,
        "few-tasks: no control groups can be made": not place.limits_tasks,
        "io-error, slow-disk, clock-jump: no compiler": place.shim is None,
    }
    return "cannot be tried here: " + (
        "; ".join(text for text, is_missing in missing.items() if is_missing) or "nothing"
    )


def _tell(begun: float, text: str) -> None:
    print(f"{time.monotonic() - begun:7.1f} s  {text}", flush=True)


def _note(told: list[int], number: int) -> None:
    told.append(number)
    if len(told) > 1:
        sys.exit(130)


if __name__ == "__main__":
    sys.exit(main())
