"""``python -m ladder.bench multi_gpu`` by the name that older records give."""

import sys

from ladder.bench.multi_gpu import main

if __name__ == "__main__":
    sys.exit(main())
