"""What MkDocs needs beside docs/: pages for the repository's files that pages link, and `llms.txt`.

Links in docs/ are those of the repository, so that they also work where it is read as files. A link to a file outside
of docs/ becomes a link to a page of the site that shows this file. So nothing that the site shows is outside of it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_SHOWN = "source"
"""Folder of the site with the pages of files outside of docs/."""
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_FENCED = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
_LIST_AFTER_TEXT = re.compile(r"^(?![-*\d|#>\s])(.+)\n(?=(?:- |1\. ))", re.MULTILINE)
_LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".yml": "yaml"}
_SIDE = "---\nsearch:\n  exclude: true\n---\n"


def slug(text: str, separator: str) -> str:
    """Return the anchor that GitHub gives a heading, which links of the pages use."""
    return re.sub(r"[^\w\- ]", "", re.sub(r"<[^>]*>", "", text).lower()).replace(" ", separator)


def place_of(src_uri: str) -> str:
    """Return the path in the repository of the file that a page shows."""
    if src_uri.startswith(f"{_SHOWN}/"):
        return src_uri.removeprefix(f"{_SHOWN}/").removesuffix(".md")
    return f"docs/{src_uri}"


def page_of(path: str) -> str:
    """Return the source name of the page that shows a file of the repository."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{_SHOWN}/{path}.md"


def targets(text: str, place: str) -> list[str]:
    """Return the repository's files, by path, that the text of a file links."""
    prose = _FENCED.sub("", text)
    links = (link.partition("#")[0] for _, link, _ in _LINK.findall(prose) if "://" not in link)
    return [posixpath.normpath(posixpath.join(posixpath.dirname(place), link)) for link in links if link]


def rewritten(text: str, src_uri: str) -> str:
    """Return a page's Markdown with the site's links, and with the empty lines before lists that MkDocs needs."""
    place, folder = place_of(src_uri), posixpath.dirname(src_uri)

    def replaced(match: re.Match[str]) -> str:
        link, hash_, anchor = match[2].partition("#")
        if not link or "://" in match[2] or link.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(place), link))
        return f"{match[1]}{posixpath.relpath(page_of(path), folder or '.')}{hash_}{anchor}{match[3]}"

    parts = _FENCED.split(text)
    parts[::2] = [_LINK.sub(replaced, _LIST_AFTER_TEXT.sub(r"\1\n\n", part)) for part in parts[::2]]
    return "".join(parts)


def shown(path: str) -> str:
    """Return the Markdown of the page that shows a file, or lists a folder, of the repository."""
    file = ROOT / path
    if file.is_dir():
        names = sorted(one.name for one in file.iterdir() if not one.name.startswith(("_", ".")))
        return f"{_SIDE}# {path}\n\n" + "".join(f"- `{name}`\n" for name in names)
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return _SIDE + text
    return f"{_SIDE}# {path}\n\n~~~~{_LANGUAGES.get(file.suffix, 'text')}\n{text}\n~~~~\n"


def on_config(config: Any) -> Any:
    """Give headings the anchors that links of the pages use."""
    config.mdx_configs["toc"]["slugify"] = slug
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the repository's files that pages of docs/, or of those files, link."""
    from mkdocs.structure.files import File, InclusionLevel

    waiting = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    added: set[str] = set()
    while waiting:
        src_uri, text = waiting.pop()
        for path in targets(text, place_of(src_uri)):
            if path.startswith("docs/") or path in added or not (ROOT / path).exists():
                continue
            added.add(path)
            page = File.generated(config, page_of(path), content=shown(path), inclusion=InclusionLevel.NOT_IN_NAV)
            files.append(page)
            if path.endswith(".md"):
                waiting.append((page.src_uri, page.content_string))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Give a page the links of the site. One that is a tab by itself needs no list of pages beside it."""
    if page.parent is None and not page.file.src_uri.startswith(f"{_SHOWN}/"):
        page.meta["hide"] = ["navigation"]
    return rewritten(markdown, page.file.src_uri)


def on_nav(nav: Any, config: Any, files: Any) -> None:
    """Keep the navigation, from which `llms.txt` is made."""
    config.extra["nav"] = nav


def on_post_build(config: Any) -> None:
    """Write `llms.txt`, a list of the pages with their first sentences, and the pages' Markdown beside them."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for item in config.extra.pop("nav").items:
        pages = [item] if item.is_page else [child for child in item.children if child.is_page]
        lines += ["", f"## {item.title}", ""]
        for page in pages:
            text = (Path(config.docs_dir) / page.file.src_uri).read_text(encoding="utf-8")
            copy = Path(config.site_dir) / page.file.src_uri
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text, encoding="utf-8")
            lines.append(f"- [{page.title}]({page.file.src_uri}){_about(text)}")
    (Path(config.site_dir) / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _about(text: str) -> str:
    """Return a page's first sentence after a colon, without Markdown; "" if it begins with something else."""
    body = re.sub(r"^---\n.*?\n---\n", "", text, flags=re.DOTALL)
    for paragraph in re.split(r"\n\s*\n", body):
        if re.match(r"[A-Z`\[*]", paragraph) and not paragraph.startswith("```"):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", " ".join(paragraph.split()))
            return f": {re.split(r'(?<=[.:]) (?=[A-Z])', plain)[0].rstrip(':.')}."
    return ""
