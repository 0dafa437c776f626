"""Swift: mixture-of-experts training in JAX for unevenly loaded experts and failing machines.

``swift.train`` drives training: a batch from ``swift.data`` passes through ``swift.models`` and ``swift.experts`` on
the devices of a ``swift.mesh``. ``swift.schedules`` plans pipelines and depends on none of these packages. Each
package's ``__init__`` lists its public names. ``python -m swift --help`` lists the commands.
"""

from swift.errors import RunError, SettingError

__version__ = "0.1.0"
DISTRIBUTION = "swift-moe"
"""Name of this package's distribution; other distributions on PyPI also install a top-level ``swift``."""

__all__ = ["RunError", "SettingError"]
