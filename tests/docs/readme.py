import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
MODEL = "Qwen/Qwen3-8B"  # Of the lines that start a server.
DIRECTORY = "/var/tmp/kvtier"  # Likewise.


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def serve():
    (lines,) = (block for block in blocks("sh") if block.startswith("vllm serve "))
    return lines.rstrip("\n")


def serve_arguments():
    return shlex.split(serve())


def section(heading):
    return TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
