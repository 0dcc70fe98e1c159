"""What several test files share: the repository's root, cases and oracles, and a fresh Python."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
