"""The program of a scoring process: `python -m ostinato.ppo.rewards.worker FD LIMIT_MB`.

It is a program of its own, not a fork and not a `multiprocessing` child: it starts in a fraction of a second, imports
neither torch nor the user's main script, and can be started from a threaded process.

Over the socket `FD` it gets one `Recipe`, then lists of rows. It answers `READY` or `INVALID`; for each list `BEGUN`
once its scorers are imported, then one message a row: the row that is under way is always the first without an answer.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import resource
import select
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

from ostinato.ppo.rewards.errors import ScorerError
from ostinato.ppo.rewards.recipe import Recipe, Resolver, Row, RowBatch

READY, INVALID, BEGUN, SCORED, SCORED_WHOLE, FAILED = "ready", "invalid", "begun", "scored", "scored whole", "failed"
MESSAGES = (READY, INVALID, BEGUN, SCORED, SCORED_WHOLE, FAILED)

TRACEBACK_CHARACTERS = 4000
ORPHAN_SECONDS_A_LIST = 3600.0


def main() -> None:
    """Serve until the other side closes the socket."""
    fd, limit_mb = int(sys.argv[1]), int(sys.argv[2])
    # What a reward function prints must not get between the lines of the run's own output.
    os.dup2(2, 1)
    if limit_mb > 0:
        # Memory that the process writes to; address space alone (libraries reserve plenty of it) is not limited.
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = limit_mb << 20
        resource.setrlimit(resource.RLIMIT_DATA, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    connection = Connection(fd)
    end_with_parent(fd)
    serve(connection)


def end_with_parent(fd: int) -> None:
    """End this process when the other side of the socket is gone, also in the middle of a call."""

    def watch() -> None:
        poll = select.poll()
        poll.register(fd, 0)  # a hang-up is reported without being asked for
        while not any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll()):
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True, name="end-with-parent").start()


def serve(connection: Connection) -> None:
    """Answer messages until the socket is closed."""
    try:
        recipe: Recipe = connection.recv()
        try:
            resolver = Resolver(recipe)
        except BaseException as error:
            connection.send((INVALID, describe(error)))
            return
        connection.send((READY,))
        while True:
            score_rows(connection, resolver, connection.recv())
    except (EOFError, ConnectionError):
        return


def score_rows(connection: Connection, resolver: Resolver, rows: list[Row | RowBatch]) -> None:
    """Score one list of rows, sending each result when it is there; a whole batch counts as one row."""
    own = os.getpid()
    # A native call that never gives up the interpreter also keeps the watching thread from running; this timer does
    # not need the interpreter, and only matters where the parent was killed.
    with open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(ORPHAN_SECONDS_A_LIST, exit=True, file=nowhere)
        try:
            try:
                for data_source in {row.data_source for row in rows}:
                    resolver.function(data_source)
            except BaseException as error:
                connection.send((INVALID, describe(error)))
                return
            connection.send((BEGUN,))
            for row in rows:
                result = pickle.dumps(score_row(resolver, row))
                if os.getpid() != own:  # a fork that the scorer made and did not end: the row is not its to answer
                    os._exit(0)
                connection.send_bytes(result)
        finally:
            faulthandler.cancel_dump_traceback_later()


def score_row(resolver: Resolver, row: Row | RowBatch) -> tuple[Any, ...]:
    """Score one row; a scorer that raises, or asks to exit, is a message like any other."""
    try:
        if isinstance(row, RowBatch):
            parts = resolver.score_whole(row)
            return SCORED_WHOLE, [describe(part) if isinstance(part, Exception) else part for part in parts]
        return (SCORED, *resolver.score(row))
    except BaseException as error:
        return FAILED, describe(error)


def describe(error: BaseException) -> str:
    """The error as text, without the frames of this program."""
    if isinstance(error, ScorerError):
        return str(error)
    text = "".join(traceback.format_exception(error))
    return text if len(text) <= TRACEBACK_CHARACTERS else "…" + text[-TRACEBACK_CHARACTERS:]


if __name__ == "__main__":
    main()
