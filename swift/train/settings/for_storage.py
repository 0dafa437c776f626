"""The experiment of processes that store its states and run none of its steps."""

from dataclasses import replace

from swift.train.settings.experiment import Experiment


def for_storage(experiment: Experiment) -> Experiment:
    """Returns the same experiment with a kernel of attention for any devices, on which its states do not depend."""
    return replace(experiment, attention="auto")
