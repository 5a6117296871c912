"""The documentation site, as far as it can be checked without building it; `ci/docs` builds it."""

from __future__ import annotations

import runpy
from pathlib import Path


def test_every_page_is_in_the_navigation_or_in_the_index_of_the_lab_notebook() -> None:
    site = runpy.run_path(str(Path(__file__).resolve().parents[2] / "ci/docs_site.py"))
    assert site["unlisted"]() == []
