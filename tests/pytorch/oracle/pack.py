"""python pack.py FOLDER answers.json.xz: adds what `ask.py` wrote to the compressed answers."""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path


def main() -> None:
    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    packed = json.loads(lzma.decompress(target.read_bytes())) if target.exists() else {}
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        release = packed.setdefault(found["version"], {"named": {}, "generated": {}})
        release["cudnn"] = found["cudnn"]
        release["named"][found["card"]] = {"order": found["order"], "cases": found["cases"]}
        release["generated"][found["card"]] = found["generated"]
    text = json.dumps(packed, sort_keys=True).encode()
    target.write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main()
