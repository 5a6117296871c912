"""The documentation site, as far as it can be checked without building it; `ci/docs` builds it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_page_is_in_the_navigation_or_in_the_index_of_the_lab_notebook() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    experiments = (ROOT / "docs/lab/README.md").read_text()
    missing = []
    for path in sorted((ROOT / "docs").rglob("*.md")):
        page = str(path.relative_to(ROOT / "docs"))
        is_experiment = page.startswith("lab/") and path.name != "README.md"
        listed = f"({path.name})" in experiments if is_experiment else page in navigation
        if not listed:
            missing.append(page)
    assert missing == []
