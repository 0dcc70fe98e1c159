"""``python -m ladder.bench variants`` by the name that older records give."""

import sys

from ladder.bench.variants import main

if __name__ == "__main__":
    sys.exit(main())
