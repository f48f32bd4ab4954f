"""What a page says of itself in a browser, after some clicks and keys."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine; write: apt-get install chromium")

SAY = """
const out = document.createElement("output");
out.id = "said";
out.textContent = JSON.stringify(said);
document.body.append(out);
"""


def opened(page: str, script: str, folder: Path, *options: str) -> Any:
    """Open a page, run a script on it, and return what that has put into its object `said`.

    Args:
        page: the HTML.
        script: JavaScript.
        folder: where files may be written.
        options: further ones of the browser.
    """
    assert BROWSER is not None
    path = folder / "tried.html"
    path.write_text(page.replace("</body>", f"<script>{{const said = {{}};{script}{SAY}}}</script></body>"))
    run = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", *options, path.as_uri()]
    done = subprocess.run(run, capture_output=True, text=True, timeout=580, check=True)
    found = re.search(r'<output id="said">(.*?)</output>', done.stdout, re.DOTALL)
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))
