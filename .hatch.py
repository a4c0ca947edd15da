"""The package's description: the README with whole addresses, as a package index needs them."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

HOME = "https://github.com/kvtier/kvtier/blob/main/"
PICTURES = "https://raw.githubusercontent.com/kvtier/kvtier/main/"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#)([^)]+)\)")


class WholeAddresses(MetadataHookInterface):
    """Makes the README's relative links absolute."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the description."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        whole = LINK.sub(lambda link: f"{link[1]}[{link[2]}]({PICTURES if link[1] else HOME}{link[3]})", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": whole}
