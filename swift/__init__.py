"""Swift: mixture-of-experts training in JAX where experts are unevenly loaded and machines fail.

A batch flows from ``swift.data`` through ``swift.models`` and ``swift.experts``, on a ``swift.mesh``; ``swift.train``
drives it. ``swift.schedules`` plans pipelines and depends on none of them. Each package's ``__init__`` lists its public
names. ``python -m swift --help`` lists the commands.
"""

from swift.errors import RunError, SettingError

__all__ = ["RunError", "SettingError"]
