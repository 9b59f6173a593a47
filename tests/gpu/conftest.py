from __future__ import annotations

import torch

# Without CUDA nothing in this folder is collected (tests/whole/test_benchmarks.py sees to it that it can be imported).
collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
