"""A user's transform that stands still."""

import time
from pathlib import Path


def while_its_gate_is_there(texts: list[str]) -> list[str]:
    """Each text begins with the path of its gate."""
    while Path(texts[0].split()[0]).exists():
        time.sleep(0.05)
    return texts
