"""`python -m benchmarks.suites vision|text`: see `run.py`."""

import sys

from benchmarks.suites.run import main

sys.exit(main())
