"""How a reshard is cut up and who does the sending."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import LayoutError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ReshardOptions:
    """Options of `plan_reshard`; part of the plan, so that both ends cut messages alike.

    Attributes:
        bucket_bytes: Size that no message exceeds.
        pack_below: Boxes smaller than this share messages; larger ones travel alone, from and
            into place where their memory is in one run.
        max_staging_bytes: Bytes of buffers that a rank has under way at a time; no bound by
            default.
        sources: ``"balanced"``: ranks that hold the same box share the sending.  ``"lowest"``:
            the lowest rank sends.
        hosts: Host of each rank, where known (`plan_reshard` takes the number of ranks that every
            host has, too): a holder on the same host is preferred, and a box
            that several ranks of a host want enters it once and is passed on there.
    """

    bucket_bytes: int = 32 * MIB
    pack_below: int = MIB // 4
    max_staging_bytes: int | None = None
    sources: str = "balanced"
    hosts: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, **options: Any) -> ReshardOptions:
        """From keyword arguments; ``hosts`` as a mapping of ranks.

        Raises:
            LayoutError: for a value that cannot be used.

        >>> ReshardOptions.of(bucket_bytes=1 << 20, max_staging_bytes=1 << 20).bucket_bytes
        524288
        """
        unknown = sorted(set(options) - set(cls.__slots__))
        if unknown:
            raise LayoutError(f"Cannot plan with {unknown}: expected options {cls.__slots__}.")
        hosts = options.pop("hosts", None) or {}
        if isinstance(hosts, Mapping):
            numbers: dict[Any, int] = {}
            for rank in sorted(hosts):
                numbers.setdefault(hosts[rank], len(numbers))
            options["hosts"] = tuple((rank, numbers[hosts[rank]]) for rank in sorted(hosts))
        else:
            options["hosts"] = tuple(hosts)
        for name in ("bucket_bytes", "pack_below", "max_staging_bytes"):
            value = options.get(name, 1)
            if not isinstance(value, int) and not (value is None and name == "max_staging_bytes"):
                raise LayoutError(f"Cannot plan with {name}={value!r}: expected bytes.")
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in options["hosts"]):
            raise LayoutError(
                f"Cannot plan with hosts={hosts!r}: expected a mapping of ranks to hosts, or how "
                f"many ranks a host has."
            )
        out = cls(**options)
        bucket, limit = out.bucket_bytes, out.max_staging_bytes
        if out.sources not in ("balanced", "lowest"):
            raise LayoutError(
                f"Cannot plan with sources={out.sources!r}: expected 'balanced' or 'lowest'."
            )
        if limit is not None:
            # One message out and one in must fit at a time.
            bucket = min(bucket, limit // 2)
        if bucket < 64 or out.pack_below < 0:
            raise LayoutError(
                f"Cannot plan with buckets of {bucket} bytes: expected 64 or more, and twice that "
                f"for max_staging_bytes."
            )
        pack = min(out.pack_below, bucket // 2)
        return cls(bucket, pack, limit, out.sources, out.hosts)
