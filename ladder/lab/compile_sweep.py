"""``python -m ladder.lab.compile.sweep`` by the name that older records give."""

import sys

from ladder.lab.compile.sweep import main

if __name__ == "__main__":
    sys.exit(main())
