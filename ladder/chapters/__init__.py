"""What the notebooks call, a folder a chapter. In a notebook a row that is not recorded is told in a sentence."""

from . import missing

missing.install_here()
