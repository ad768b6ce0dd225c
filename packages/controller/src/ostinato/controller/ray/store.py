"""Ray's object store as a place for rows: a block is an object, dropped with its last reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ostinato.controller.arrival import Absent
from ostinato.controller.colocate import restore
from ostinato.controller.errors import WorkerDied
from ostinato.protocol.blocks import packed_blocks


class RayStore:
    """The store of the cluster that this process has joined."""

    def put(self, tensors: Mapping[str, torch.Tensor], arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Store columns; cells lie apart from numbers."""
        import ray

        references: dict[str, Any] = {}
        for names, block in packed_blocks(tensors, arrays):
            references |= dict.fromkeys(names, ray.put(block))
        return references

    def put_order(self, order: np.ndarray) -> Any:
        """Store row numbers."""
        import ray

        return ray.put(order)

    def fetch(self, references: Sequence[Any]) -> list[Any]:
        """Map objects into this process, from another node if need be."""
        import ray
        from ray import cloudpickle
        from ray.exceptions import RayError

        try:
            found = ray.get(list(references))
        except RayError as error:
            reason = f"its rows were lost ({type(error).__name__})"
            raise WorkerDied("store", 0, "not known", "get", str(error), reason) from error
        for value in found:
            if isinstance(value, Absent):
                raise restore(value.failure, "store", 0, "not known", "get", cloudpickle.loads)
        return found


RAY = RayStore()
"""The one Ray store of this process."""
