"""Named as `model.external_lib`, this makes Megatron-Core run on the CPU in every process of a run."""

from __future__ import annotations

from ostinato.workers.megatron.testing import cpu

cpu.install()
