"""Importing this plugs Rollway into NeMo-RL: `import rollway.integrations.nemo_rl.auto`."""

from rollway.integrations.nemo_rl.plug import install

install()
