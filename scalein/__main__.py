"""`python -m scalein`: the command line without the installed script."""

import sys

from scalein.cli.main import main

sys.exit(main())
