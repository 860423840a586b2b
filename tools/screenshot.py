"""Take the picture docs/img/report.png, the first screen of a report on data/, and two of the explorer, with Chromium.

    PYTHONPATH=benchmarks:tests python tools/screenshot.py [--page FILE.html] [--whole FILE.png]

``--whole`` takes the whole page into another file, and ``--page`` shows a page that exists already.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from pages import IMAGES, ROOT
from PIL import Image
from support.browser import Browser

from gradstats.explorer import write_explorer

WIDTH, FIRST_SCREEN, WHOLE = 1280, 860, 16_000


def shoot(chromium: str, page: Path, image: Path, height: int) -> None:
    """Take the top of a page into a PNG of 256 colours."""
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


EXPLORED = {
    "explore-overview.png": ("#gs-loss", "#gs-strips"),
    "explore-step.png": ("#gs-survival", "#gs-survival"),
}
"""Pictures of the explorer, and the first and last figure on each."""


def explore() -> None:
    """Take the pictures of the explorer."""
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        page = Path(folder) / "explore.html"
        write_explorer(ROOT / "data" / "resnet20.zarr", page)
        for name, ends in EXPLORED.items():
            # a tab each: to take more than fits on the screen changes its size, and the page is drawn again
            with browser.open(page.as_uri(), width=1100, height=WHOLE // 4) as tab:
                tab.until("document.querySelector('#gs-thresholds svg')?.clientWidth > 900")
                tab.picture(IMAGES / name, *ends)
            with Image.open(IMAGES / name) as drawn:
                small = drawn.convert("RGB").quantize(256)
            small.save(IMAGES / name, optimize=True)
            print(f"{IMAGES / name}: {(IMAGES / name).stat().st_size / 1000:.0f} kB")


def main() -> None:
    """Write the report if no page is given, and take the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--page", type=Path, metavar="FILE.html", help="page to show")
    parser.add_argument("--whole", type=Path, metavar="FILE.png", help="take the whole page here")
    options = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("no Chromium found; install it: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        page = options.page or Path(folder) / "report.html"
        if options.page is None:
            program = Path(sys.executable).with_name("gradstats")
            subprocess.run([program, "report", "data", "-o", page], check=True, cwd=ROOT)
        image = options.whole or IMAGES / "report.png"
        shoot(chromium, page, image, WHOLE if options.whole else FIRST_SCREEN)
        if options.page is None and options.whole is None:
            explore()
    print(f"{image}: {image.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
