"""The calls by which a role worker's trained model is saved."""

from __future__ import annotations

import logging
from pathlib import Path

from ostinato.controller import Dispatch, Worker, register
from ostinato.workers.core.checkpoint import RoleCheckpoint

logger = logging.getLogger(__name__)


class SavedWorker(Worker):
    """A role worker with a model that is trained."""

    def _saved(self, method: str) -> RoleCheckpoint:
        """What saves and loads the model.

        Args:
            method: who asks, for the error.

        Raises:
            RoleError: there is no such model.
        """
        raise NotImplementedError

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, step: int | None = None) -> None:
        """Write model, optimizer, schedule and random state under `path`, or begin to; collective.

        Args:
            path: a folder that does not hold another checkpoint.
            step: the trainer's, for the log.

        Raises:
            OSError: it could not be written.
        """
        self._saved("save_checkpoint").save(Path(path), writes=self.rank == 0)
        # The folder may get another name once all roles are saved: the caller reports that one.
        logger.debug("rank %d: %s of step %s is written under %s", self.rank, type(self).__name__, step, path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checkpoint_saved(self, wait: bool = False) -> bool:
        """Whether the last `save_checkpoint` is whole; with `checkpoint.async_save` it is so some time later.

        Args:
            wait: wait until it is.

        Raises:
            OSError: it could not be written.
        """
        return self._saved("checkpoint_saved").saved(wait)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Read what `save_checkpoint` wrote, at any number of ranks; collective. A reference stays as it is.

        Args:
            path: the folder.

        Raises:
            OSError: there is no whole checkpoint, or it belongs to another model.
        """
        self._saved("load_checkpoint").load(Path(path))
