"""`python -m unshard`."""

import sys

from unshard.cli import main

sys.exit(main())
