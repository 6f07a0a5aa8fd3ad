"""`python -m onward` is the command `onward`."""

import sys

from onward.cli import main

sys.exit(main())
