"""What the documentation site needs besides mkdocs.yml: hooks of MkDocs, and the check of links in the built pages.

Documents outside docs/ (README.md, SECURITY.md, ...) become pages without a copy in git, and links to sources become
pages with these sources, so that every relative link that works in the repository works on the site.

    mkdocs build                          calls the hooks (`hooks:` in mkdocs.yml)
    python ci/docs_site.py SITE           checks that each relative link of the pages in SITE has a target
"""

from __future__ import annotations

import posixpath
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]

# Documents outside docs/, and their pages.
PROJECT = {
    "README.md": "project/readme.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "examples/README.md": "project/examples.md",
    "traces/README.md": "project/traces.md",
    "crates/ep-plan/SIMULATOR.md": "project/simulator.md",
    "crates/ep-plan/NOTES.md": "project/planner-notes.md",
}

PYTHON_PAGE = """# Python API

The package `hybrid_ep`. The [PyTorch guide](../python.md) explains the calls.

::: hybrid_ep
    options:
      show_root_heading: false
      show_root_toc_entry: false
      inherited_members: [attach, backend, close, device, domains, group, local_experts, mesh, num_experts,
        num_local_experts, rank, registered_bytes, synchronize, threads, traffic, world_size]
      members: [Buffer, Work, Handle, Dispatched, Combined, Traffic, MoELayer, TokenDispatcher, HybridEPError,
        CallerError, SetupError, PeerError, install_as_deep_ep]

## Layers of your own

::: hybrid_ep.moe
    options:
      show_root_heading: false
      show_root_toc_entry: false
      inherited_members: false
      members: [LocalExperts, GroupedExperts, Router, local_part, expert_parameters, parameter_groups,
        reduce_gradients, clip_gradients]

## Across datacenters

::: hybrid_ep.migration
    options:
      show_root_heading: false
      show_root_toc_entry: false
      inherited_members: false
      members: [ExpertDomains, ExpertMigration, HybridMoELayer, HybridExperts]
"""

RUST_PAGE = """# Rust API

rustdoc of the workspace's crates:

| crate | what |
|---|---|
| <a href="../../rust/ep/index.html">ep</a> | the core: types, layout, the operators' definition, the backends' traits |
| <a href="../../rust/ep_rail/index.html">ep_rail</a> | what backends share to move bytes between NVLink domains |
| <a href="../../rust/ep_host/index.html">ep_host</a> | the CPU backend |
| <a href="../../rust/ep_cuda/index.html">ep_cuda</a> | the CUDA backend |
| <a href="../../rust/ep_codec/index.html">ep_codec</a> | codecs for expert weights and gradients between datacenters |
| <a href="../../rust/ep_migrate/index.html">ep_migrate</a> | the migration of experts between datacenters |
| <a href="../../rust/ep_plan/index.html">ep_plan</a> | the cross-datacenter model, planner, and simulator |
| <a href="../../rust/ep_cli/index.html">ep_cli</a> | the program `hybrid-ep` as a library |
"""

# Pictures in text are up to 110 columns wide.
STYLE = """.md-grid { max-width: 78rem; }
.md-typeset pre > code { font-size: 0.75em; }
.md-typeset table:not([class]) th { min-width: 3rem; }
"""

LANGUAGES = {
    ".rs": "rust",
    ".py": "python",
    ".cu": "cuda",
    ".cuh": "cuda",
    ".toml": "toml",
    ".md": "markdown",
    ".tsv": "text",
}
# The target of a link or image of Markdown; the text before it may begin in an earlier line.
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
ITEM = re.compile(r"(?:[-*]|\d+\.) ")


def repository_path(src_uri: str) -> str | None:
    """The document in the repository that a page shows."""
    for path, page in PROJECT.items():
        if page == src_uri:
            return path
    return f"docs/{src_uri}" if (ROOT / "docs" / src_uri).is_file() else None


def page_of(path: str) -> str | None:
    """The page, or the file in docs/, that shows a path of the repository; `None` for a path that does not exist."""
    if path in PROJECT:
        return PROJECT[path]
    if path.startswith("docs/") and (ROOT / path).is_file():
        return path.removeprefix("docs/")
    return f"source/{path}.md" if (ROOT / path).exists() else None


def split_link(base: str, target: str) -> tuple[str, str] | None:
    """The path in the repository that a link in `base` names, and its anchor; `None` for links to elsewhere."""
    if target.startswith("#") or urlsplit(target).scheme:
        return None
    path, _, anchor = target.partition("#")
    joined = posixpath.normpath(posixpath.join(posixpath.dirname(base), path))
    return joined, f"#{anchor}" if anchor else ""


def prose(markdown: str) -> list[tuple[bool, str]]:
    """The lines, each with whether it is outside of fences."""
    lines, fence = [], ""
    for line in markdown.split("\n"):
        start = re.match(r"\s*(`{3,})", line)
        outside = not fence and start is None
        if start:
            fence = "" if fence and start[1].startswith(fence) else fence or start[1]
        lines.append((outside, line))
    return lines


def sources() -> dict[str, str]:
    """All paths of the repository that documents link to and that are not documents themselves, with their pages."""
    found: dict[str, str] = {}
    documents = [ROOT / path for path in PROJECT] + sorted((ROOT / "docs").rglob("*.md"))
    for document in documents:
        base = str(document.relative_to(ROOT))
        for outside, line in prose(document.read_text()):
            for match in LINK.finditer(line) if outside else ():
                link = split_link(base, match[2])
                page = page_of(link[0]) if link else None
                if link and page and page.startswith("source/"):
                    found[link[0]] = page
    return found


def source_page(path: str) -> str:
    """The Markdown of a page that shows a source, or what is in a directory."""
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n"
    if (ROOT / path).is_dir():
        return head + "\n".join(f"- `{entry.name}`" for entry in sorted((ROOT / path).iterdir()))
    text = (ROOT / path).read_text()
    return f"{head}``````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text.rstrip()}\n``````\n"


def experiments() -> list[str]:
    """The pages of the lab notebook except its index, in the order of their numbers."""
    return sorted(f"lab/{path.name}" for path in (ROOT / "docs/lab").glob("[0-9]*.md"))


def unlisted() -> list[str]:
    """The pages in docs/ that are neither in the navigation nor, as experiments, in the index of the lab notebook."""
    navigation = (ROOT / "mkdocs.yml").read_text()
    index = (ROOT / "docs/lab/README.md").read_text()
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]
    return [
        page
        for page in pages
        if (f"({posixpath.basename(page)})" not in index if page in experiments() else page not in navigation)
    ]


def on_config(config: Any) -> Any:
    from mkdocs.exceptions import PluginError

    if missing := unlisted():
        raise PluginError(f"neither mkdocs.yml nor docs/lab/README.md lists {', '.join(missing)}")
    for section in config.nav:
        for entry in next(iter(section.values())):
            if isinstance(entry, dict) and "Lab notebook" in entry:
                entry["Lab notebook"].extend(experiments())
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    def add(page: str, content: str) -> None:
        files.append(File.generated(config, page, content=content))

    for path, page in PROJECT.items():
        add(page, (ROOT / path).read_text())
    for path, page in sources().items():
        add(page, source_page(path))
    add("reference/python.md", PYTHON_PAGE)
    add("reference/rust.md", RUST_PAGE)
    add("assets/site.css", STYLE)
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    base = repository_path(page.file.src_uri)
    if base is None:
        return markdown
    here = posixpath.dirname(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        link = split_link(base, match[2])
        to = page_of(link[0]) if link else None
        if link is None or to is None:
            # MkDocs reports a link without a target.
            return match[0]
        return f"{match[1]}{posixpath.relpath(to, here or '.')}{link[1]}{match[3]}"

    lines: list[str] = []
    in_list = False
    for outside, line in prose(markdown):
        # GitHub begins a list without an empty line before it; Python-Markdown does not.
        is_item = outside and ITEM.match(line.lstrip()) is not None
        if is_item and not in_list and lines and lines[-1].strip():
            lines.append("")
        in_list = is_item or (in_list and bool(line.strip()))
        lines.append(LINK.sub(moved, line) if outside else line)
    return "\n".join(lines)


class Page(HTMLParser):
    """The links and anchors of a built page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name == "id":
                self.anchors.add(value)
            elif value and (name == "href" or name == "src"):
                self.links.append(value)


def broken_links(site: Path) -> list[str]:
    """Relative links without a target, on all pages except those of rustdoc, whose links rustdoc checks."""
    pages: dict[Path, Page] = {}

    def parsed(path: Path) -> Page:
        if path not in pages:
            pages[path] = Page(path)
        return pages[path]

    broken = []
    for path in sorted(site.rglob("*.html")):
        # The page for addresses that do not exist has links from the site's root.
        if path.relative_to(site).parts[0] == "rust" or path.name == "404.html":
            continue
        for link in parsed(path).links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                broken.append(f"{path.relative_to(site)}: {link}: there is no {target}")
                continue
            is_own = target.suffix == ".html" and target.relative_to(site).parts[0] != "rust"
            if parts.fragment and is_own and unquote(parts.fragment) not in parsed(target).anchors:
                broken.append(f"{path.relative_to(site)}: {link}: the page has no such anchor")
    return broken


def main() -> None:
    site = Path(sys.argv[1]).resolve()
    broken = broken_links(site)
    for line in broken:
        print(f"ci/docs: {line}", file=sys.stderr)
    if broken:
        sys.exit(f"ci/docs: {len(broken)} broken link(s)")
    print(f"links of {sum(1 for _ in site.rglob('*.html'))} pages: none broken")


if __name__ == "__main__":
    main()
