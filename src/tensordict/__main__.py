"""``python -m tensordict`` is the ``tensordict`` command."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
