"""Tests run the kernels in Triton's interpreter; its switch is read when Triton is imported."""

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent))

from interpreter import repair  # noqa: E402  (after the switch)

repair()
