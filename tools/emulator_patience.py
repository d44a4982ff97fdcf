"""A plugin of pytest for an emulator, where all takes ten times as long (``run_on_arm.py``): longer deadlines."""

from totalreduce.foundation.config import TcpConfig
from totalreduce.testing import ranks

TcpConfig.__init__.__kwdefaults__["silence_s"] = 120.0
ranks.run_ranks.__kwdefaults__["timeout_s"] = 1500.0
