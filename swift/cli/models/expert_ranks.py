"""The option ``--expert-ranks`` of the commands whose answers come from the engine."""

from collections.abc import Sequence

from swift.cli.commands import prepare
from swift.errors import renamed_settings
from swift.generate.paged_model import check_devices, check_expert_ranks
from swift.train.settings.experiment import Experiment


def prepare_engine(expert_ranks: int, experiments: Sequence[Experiment]) -> None:
    """Configures JAX, before it starts, for engines whose experts are spread over devices.

    Args:
        expert_ranks: value of ``--expert-ranks``; emulated devices are as many.
        experiments: settings of the models.

    Raises:
        SettingError: the experts of a model cannot be spread evenly, or there are not as many devices.
    """
    with renamed_settings({"TextEngineConfig.expert_ranks": "--expert-ranks"}):
        for experiment in experiments:
            check_expert_ranks(expert_ranks, experiment.experts.num_classes)
        prepare(experiments, num_devices=expert_ranks)
        check_devices(expert_ranks)
