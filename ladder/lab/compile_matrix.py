"""``python -m ladder.lab.compile.matrix`` by the name that older records give."""

import sys

from ladder.lab.compile.matrix import main

if __name__ == "__main__":
    sys.exit(main())
