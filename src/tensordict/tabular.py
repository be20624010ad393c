"""Tables in and out: ``tensordict.tabular``."""

from __future__ import annotations

from .containers.factories import from_csv, from_json, from_pandas, from_parquet
from .ops.convert_arrow import from_arrow, to_arrow

__all__ = ["from_arrow", "from_csv", "from_json", "from_pandas", "from_parquet", "to_arrow"]
