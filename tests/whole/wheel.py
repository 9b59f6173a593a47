"""``make wheel``: build the wheel, and try it in clean environments, plain and with each extra.

    python tests/whole/wheel.py [EXTRA ...]    # "" for none; default: none, and all of pyproject.toml, one by one

Needs ``build`` in this environment, and what ``pip install`` needs to get at packages.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def smoke() -> None:
    """Run in a clean environment, by its Python, outside the checkout."""
    import importlib.util
    from importlib.metadata import version

    import torch
    import torch.nn as nn

    import fsdp_compose
    from fsdp_compose import checkpoint, fully_shard
    from fsdp_compose.testing import assert_trains_like_unsharded, simulated_ranks

    where = Path(fsdp_compose.__file__)
    assert "site-packages" in where.parts and (where.parent / "py.typed").exists(), where
    assert fsdp_compose.__version__ == version("fsdp-compose"), fsdp_compose.__version__

    with simulated_ranks(1):
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

        def shard(model: nn.Module) -> None:
            for layer in (model[0], model[2]):
                fully_shard(layer)
            fully_shard(model)

        def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return model(x).square().mean()

        assert_trains_like_unsharded(model, shard, [torch.randn(6, 4) for _ in range(3)], loss)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save({"model": model.state_dict()}, f"{folder}/step-3")
            checkpoint.load({"model": model.state_dict()}, f"{folder}/step-3")
            if importlib.util.find_spec("safetensors"):
                checkpoint.save_hf(model, f"{folder}/hf")
            else:
                try:
                    checkpoint.save_hf(model, f"{folder}/hf")
                except ImportError as error:
                    assert "safetensors" in str(error), error
                else:
                    raise AssertionError("save_hf() without safetensors")
    command = [sys.executable, "-m", "fsdp_compose", "--help"]
    assert "hang" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    print(f"fsdp_compose {fsdp_compose.__version__} in {where.parents[4]}")


def extras() -> list[str]:
    project = (ROOT / "pyproject.toml").read_text()
    section = project.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    return re.findall(r"^([\w-]+) = \[", section, re.MULTILINE)


def main(chosen: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(
            [sys.executable, "-m", "build", "--outdir", name, str(ROOT)], check=True, stdout=subprocess.DEVNULL
        )
        (wheel,) = folder.glob("*.whl")
        for extra in chosen or ["", *extras()]:
            print(f"{wheel.name}[{extra}]", flush=True)
            environment = folder / f"with-{extra or 'nothing'}"
            venv.create(environment, with_pip=True)
            python, constraints = environment / "bin" / "python", ROOT / "constraints.txt"
            requirement = f"{wheel}[{extra}]" if extra else str(wheel)
            install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints]
            subprocess.run([*install, requirement], check=True)
            environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            subprocess.run([python, __file__, "--smoke"], cwd=folder, env=environ, check=True)


if __name__ == "__main__":
    smoke() if sys.argv[1:] == ["--smoke"] else main(sys.argv[1:])
