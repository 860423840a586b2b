"""Make docs/img/report.png, the first screen of a report on data/, with Chromium: ``python tools/screenshot.py``.

``--whole FILE.png`` takes the whole page instead, and ``--page FILE.html`` a page that is there already.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
WIDTH, FIRST_SCREEN, WHOLE = 1280, 860, 16_000


def shoot(chromium: str, page: Path, image: Path, height: int) -> None:
    """Draw the top of a page into a PNG of 256 colours."""
    subprocess.run(
        [
            *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *(f"--window-size={WIDTH},{height}", f"--screenshot={image}", page.resolve().as_uri()),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    with Image.open(image) as drawn:
        small = drawn.convert("RGB").quantize(256)
    small.save(image, optimize=True)


def main() -> None:
    """Write the page if none is given, and take the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--whole", type=Path, metavar="FILE.png")
    options = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("no chromium; apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        page = options.page or Path(folder) / "report.html"
        if options.page is None:
            program = Path(sys.executable).with_name("gradstats")
            subprocess.run([program, "report", "data", "-o", page], check=True, cwd=ROOT)
        image = options.whole or ROOT / "docs" / "img" / "report.png"
        shoot(chromium, page, image, WHOLE if options.whole else FIRST_SCREEN)
    print(f"{image}: {image.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
