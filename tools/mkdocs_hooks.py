"""Makes a site of documents that link to each other as files of the repository do.

README, CHANGELOG and CONTRIBUTING at the top become pages. Links to other files of the repository lead to `repo_url`,
or are plain text where mkdocs.yml has none. A link to a file that does not exist fails the build.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks.kv_canary")

REPO = Path(__file__).parent.parent
PAGES = {
    "README.md": "overview.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|`[^`]*`)*)\]\(([^)\s]+)\)")
CODE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]+`(?!\]))", re.DOTALL | re.MULTILINE)

CELL = re.compile(r"<td.*?</td>", re.DOTALL)
NAME = re.compile(r"(?<=>)[^<]*\w{3}[_/]\w[^<]*(?=<)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(REPO / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: object) -> str:
    uri = page.file.src_uri
    source = next((name for name, target in PAGES.items() if target == uri), f"docs/{uri}")
    parts = CODE.split(markdown)  # code is at the odd places
    for index in range(0, len(parts), 2):
        parts[index] = LINK.sub(lambda m: _link(m[1], m[2], source, uri, config), parts[index])
    return "".join(parts)


def on_page_content(html: str, **_: object) -> str:
    """Names in tables may break after an underscore or a slash, and nowhere else."""
    return CELL.sub(
        lambda cell: NAME.sub(lambda m: re.sub(r"([_/])", r"\1<wbr>", m[0]), cell[0]), html
    )


def _link(text: str, target: str, source: str, uri: str, config: MkDocsConfig) -> str:
    """A link of the document `source` as one of its page `uri`."""
    path, hash_, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:", target):
        return f"[{text}]({target})"
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if not (REPO / file).exists():
        log.warning("%s links to %s, which does not exist", source, file)
    if file.startswith("docs/") or file in PAGES:
        inside = PAGES.get(file, file.removeprefix("docs/"))
        return f"[{text}]({os.path.relpath(inside, posixpath.dirname(uri) or '.')}{hash_}{anchor})"
    return f"[{text}]({config.repo_url}/tree/main/{file})" if config.repo_url else text
