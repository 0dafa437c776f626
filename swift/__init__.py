"""Swift: mixture-of-experts training in JAX where experts are unevenly loaded and machines fail.

The way through is ``swift.data`` -> ``swift.models`` -> ``swift.experts`` -> ``swift.train``, on a ``swift.mesh``;
``swift.schedules`` plans pipelines and needs none of them. The public surface of each is its ``__init__``. ``python -m
swift --help`` lists the commands.
"""

from swift.errors import RunError, SettingError

__all__ = ["RunError", "SettingError"]
