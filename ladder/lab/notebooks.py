"""``python -m ladder.lab.notebooks`` is ``python -m ladder.chapters.run`` now."""

import sys

if __name__ == "__main__":
    sys.exit("python -m ladder.lab.notebooks is python -m ladder.chapters.run now")
