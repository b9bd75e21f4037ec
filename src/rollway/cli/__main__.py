"""Run `rollway` as `python -m rollway.cli`."""

import sys

from rollway.cli import main

sys.exit(main())
