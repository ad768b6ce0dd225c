"""The app's configuration for Hydra's search path: `pkg://ostinato.ppo.conf`.

Hydra imports this package when another project's search path names it. `ppo.yaml` builds on a schema that is made from
the dataclasses, so the schema is entered into Hydra's store here; nothing else happens on import.
"""

from __future__ import annotations

from ostinato.ppo.cli import register_schema

register_schema()
