"""``python -m ladder.lab.report`` is ``python -m ladder.chapters.readme`` now."""

import sys

if __name__ == "__main__":
    sys.exit("python -m ladder.lab.report is python -m ladder.chapters.readme now")
