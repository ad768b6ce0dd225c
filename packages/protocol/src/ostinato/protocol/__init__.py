"""DataProto: the one object that every stage of an RL post-training loop passes on."""

from __future__ import annotations

from ostinato.protocol.dataproto import DataProto
from ostinato.protocol.errors import ProtocolError
from ostinato.protocol.future import DataProtoFuture
from ostinato.protocol.metrics import Metric, merge_metrics
from ostinato.protocol.wire import shared_views

__all__ = ["DataProto", "DataProtoFuture", "Metric", "ProtocolError", "merge_metrics", "shared_views"]
