"""``python -m functional_booster`` is the command ``functional-booster``."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
