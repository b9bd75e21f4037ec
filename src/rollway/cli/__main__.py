"""Run `rollway` as `python -m rollway.cli`."""

import sys

from rollway.cli.main import main

sys.exit(main())
