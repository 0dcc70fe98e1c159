"""``python -m ladder.bench step08`` by the name that older records give."""

import sys

from ladder.bench.step08 import main

if __name__ == "__main__":
    sys.exit(main())
