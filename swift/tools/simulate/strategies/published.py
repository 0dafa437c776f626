"""Figures for Oobleck, Bamboo and Varuna from the simulators in Oobleck's artifact (SOSP'23).

github.com/SymbioticLab/Oobleck, tools/simulator: throughput in samples/s of 30 nodes down to 15, and the costs of a
failure. Only these figures are taken from there.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from swift.errors import SettingError

MOST_NODES, FEWEST_NODES = 30, 15
_GROUPS = (1, 6, 6, 3)
"""Sizes of the groups of 30, 29 to 24, 23 to 18 and 17 to 15 nodes, within which Bamboo's throughput is constant."""


@dataclass(frozen=True)
class Published:
    """Published figures of one model.

    Attributes:
        name: name of the model.
        samples: samples of an iteration.
        oobleck: throughput in samples/s for 30, 29, ..., 15 nodes; 0 where the model does not fit.
        oobleck_reconfiguration_s: duration of the reconfiguration after every removal.
        varuna: throughput as for Oobleck.
        varuna_save_s: duration of a checkpoint, for which training waits.
        varuna_restart_s: time from a removal until training resumes, plus a checkpoint.
        bamboo: throughput as for Oobleck; None where it runs out of memory.
        bamboo_rendezvous_s: duration of the local rendezvous that reassigns stages.
    """

    name: str
    samples: float
    oobleck: tuple[float, ...]
    oobleck_reconfiguration_s: float
    varuna: tuple[float, ...]
    varuna_save_s: float
    varuna_restart_s: float
    bamboo: tuple[float, ...] | None
    bamboo_rendezvous_s: float

    def __post_init__(self) -> None:
        for table in (self.oobleck, self.varuna, self.bamboo):
            assert table is None or len(table) == MOST_NODES - FEWEST_NODES + 1, self.name


def throughput(table: tuple[float, ...], num_nodes: int) -> float | None:
    """Looks up the throughput in samples/s: that of 30 nodes for more, and None for fewer than 15."""
    index = MOST_NODES - min(num_nodes, MOST_NODES)
    return table[index] if index < len(table) else None


def published(name: str) -> Published:
    """Looks up the figures of a model.

    Raises:
        SettingError: there are no published figures.
    """
    if name not in MODELS:
        raise SettingError("model", name, f"there are figures of {', '.join(MODELS)}")
    return MODELS[name]


def _bamboo(per_group: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(value for value, count in zip(per_group, _GROUPS, strict=True) for _ in range(count))


# fmt: off
_ALL = (
    Published(
        "bert-large", 8192,
        (368.25, 362.22, 328.35, 327.78, 329.14, 307.21, 304.45, 278.53,
         285.84, 260.31, 261.68, 243.56, 228.05, 209.21, 214.80, 192.30), 2,
        (343.13, 331.70, 329.58, 326.54, 306.04, 298.38, 290.04, 280.07,
         267.90, 255.72, 243.54, 232.95, 222.37, 211.78, 202.57, 193.36), 15.8, 76,
        _bamboo((119.25, 99.379, 74.534, 49.689)), 76,
    ),
    Published(
        "gpt-2", 1024,
        (110.01, 109.67, 98.837, 100.07, 99.480, 91.018, 90.522, 83.404,
         83.331, 76.950, 76.715, 71.587, 66.750, 63.016, 62.748, 55.916), 2,
        (125.79, 117.63, 117.63, 106.83, 110.92, 102.08, 102.08, 96.654,
         96.654, 85.834, 88.311, 78.311, 78.311, 70.464, 70.464, 64.299), 11.5, 83,
        _bamboo((27.030, 22.525, 16.893, 11.262)), 80,
    ),
    Published(
        "gpt3-medium", 819,
        (38.468, 37.186, 35.904, 34.622, 33.339, 31.666, 30.241, 28.964,
         27.775, 26.685, 25.689, 23.825, 23.034, 21.577, 20.865, 19.103), 3,
        (41.998, 38.886, 38.886, 35.850, 33.426, 33.426, 33.426, 28.264,
         28.264, 28.264, 28.232, 25.261, 25.261, 22.889, 22.889, 20.912), 11.2, 78.7,
        None, 100,
    ),
    Published(
        "gpt3-2.7b", 512,
        (9.2143, 8.9072, 8.6000, 8.2929, 7.9857, 7.6271, 7.5123, 7.4354,
         7.0528, 6.7048, 6.7973, 6.1050, 6.1151, 5.6307, 5.6306, 5.1307), 6,
        (9.7675, 9.4247, 9.4247, 9.0999, 9.0999, 9.0999, 9.0999, 7.4697,
         7.4697, 7.4697, 7.4697, 6.4246, 6.4246, 6.4246, 6.4246, 4.8638), 50, 515,
        None, 230,
    ),
    Published(
        "gpt3-6.7b", 1024,
        (5.5078, 5.3242, 5.1406, 4.9570, 4.7734, 4.8088, 4.3299, 4.1852,
         3.9472, 4.0109, 4.1544, 3.7123, 3.5933, 3.2840, 3.5309, 0.0), 10,
        (5.2406, 5.2406, 5.2406, 5.0969, 5.0969, 5.0969, 5.0969, 4.5034,
         4.5034, 4.5034, 4.5034, 3.9538, 3.9538, 3.9538, 3.9538, 3.0164), 120, 701,
        None, 450,
    ),
)
# fmt: on
MODELS: Mapping[str, Published] = {model.name: model for model in _ALL}
