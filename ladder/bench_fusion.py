"""``python -m ladder.bench fusion`` by the name that older records give."""

import sys

from ladder.bench.fusion import main

if __name__ == "__main__":
    sys.exit(main())
