"""A hook of mkdocs for links from a page to files of the repository outside docs/: an image is added to the site, and a
link to another file becomes its text, since the site has no sources."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import normpath

from mkdocs.structure.files import File

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(((?:\.\./)+[^)#]+)(#[^)]*)?\)")


def on_page_markdown(markdown, page, config, files):
    root = Path(config.docs_dir).parent
    folder = Path(config.docs_dir).name + "/" + str(Path(page.file.src_uri).parent)

    def replace(link):
        is_image, text, target, _ = link.groups()
        path = normpath(f"{folder}/{target}")
        if path.startswith("docs/"):
            return link[0]
        if not (root / path).exists():
            raise FileNotFoundError(f"{page.file.src_uri}: {target} does not exist")
        if not is_image:
            return text
        uri = f"outside/{path}"
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, abs_src_path=str(root / path)))
        return f"![{text}]({'../' * page.file.src_uri.count('/')}{uri})"

    return _LINK.sub(replace, markdown)
