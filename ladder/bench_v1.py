"""``python -m ladder.bench step07`` by the name that older records give."""

import sys

from ladder.bench.step07 import main

if __name__ == "__main__":
    sys.exit(main())
