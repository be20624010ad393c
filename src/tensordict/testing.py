"""Comparing tensordicts in tests: ``tensordict.testing``."""

from __future__ import annotations

from .ops.closeness import assert_allclose_td, assert_close

__all__ = ["assert_allclose_td", "assert_close"]
