"""``aotops new``: the package of an operator, from a template that builds and passes its checks as it is."""

from __future__ import annotations

import keyword
import os
import re
from collections.abc import Iterator
from pathlib import Path

_TEMPLATES = Path(__file__).with_name("templates")
_PLACEHOLDERS = {
    "elementwise": "scale", "row": "normalize", "reduction": "sum_squares", "product": "multiply", "triton": "swish",
}  # fmt: skip
"""The name of each template's operator, which the new one's replaces."""
_PACKAGE = "scale"
"""The files of templates/package, which all templates share. A template may have others in their place."""

TEMPLATES = tuple(_PLACEHOLDERS)


def create(name: str, template: str = "elementwise", directory: str | os.PathLike[str] | None = None) -> list[Path]:
    """Writes the package of a new operator; in a checkout of aotops, the operator's files of the library itself
    (docs/adding_an_op.md).

    Args:
        name: of the operator and its package.
        template: "elementwise", y = f(x); "row", a function of each row; "reduction", a number for each row;
            "product", of two matrices; or "triton", y = f(x) by a Triton kernel.
        directory: of the package; default: the name, in the current directory.

    Returns:
        The files.

    Raises:
        ValueError: a name that is not a valid module's, or that is taken; another template; a file that exists.
    """
    if template not in TEMPLATES:
        raise ValueError(f"new: template is {template!r}, expected {', '.join(TEMPLATES)}")
    _check_name(name)
    package = Path(directory if directory is not None else name).absolute()
    house = _checkout(package)
    if house and template == "triton":
        raise ValueError(f"new: template is 'triton', expected a directory outside {house}: it makes a package")
    files = dict(_of_checkout(template, name, house) if house else _of_package(template, name, package))
    for file in files:
        if os.path.lexists(file):
            raise ValueError(f"new: {file} exists, and is not overwritten")
    for file, text in files.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        except OSError as error:  # such as a file, or a link to nowhere, in the place of a folder
            raise ValueError(f"new: {error.filename} cannot be written to: {error.strerror}") from None
    return list(files)


def _check_name(name: str) -> None:
    from .ops import OPS

    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name) or name.endswith("_"):
        raise ValueError(f"new: name is {name!r}, expected a Python module's: small letters, digits and _")
    if "__" in name or name.endswith("_backward"):
        raise ValueError(f"new: name is {name!r}, expected one without __, and not of a gradient")
    if name in OPS:
        raise ValueError(f"new: name is {name!r}, which is an operator of aotops")
    if name in ("aotops", "test", "tests", "build", "torch", "jax", "mindspore", "cupy", "numpy", "library"):
        raise ValueError(f"new: name is {name!r}, which is another module's")


def _checkout(package: Path) -> Path | None:
    """The checkout of aotops that a folder is in."""
    marks = ("cuda_src/aot.h", "aotops/ops/__init__.py", "tests/cases")
    return next((p for p in package.parents if all((p / mark).exists() for mark in marks)), None)


# ---------------------------------------------------------------------------------------------------------- files


def _of_package(template: str, name: str, package: Path) -> Iterator[tuple[Path, str]]:
    for folder, placeholder in ((_TEMPLATES / "package", _PACKAGE), (_TEMPLATES / template, _PLACEHOLDERS[template])):
        for file in sorted(folder.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                path = _renamed(str(file.relative_to(folder)), placeholder, name)
                yield package / path, _renamed(file.read_text(), placeholder, name)


def _of_checkout(template: str, name: str, root: Path) -> Iterator[tuple[Path, str]]:
    """The template's files, where a built-in operator has them."""
    placeholder = _PLACEHOLDERS[template]
    homes = {
        f"cuda_src/{placeholder}.h": f"cuda_src/operators/{name}.h",
        f"cuda_src/{placeholder}.cpp": f"cuda_src/operators/{name}.cpp",
        f"cuda_src/{placeholder}.cu": f"cuda_src/operators/{name}.cu",
        f"{placeholder}/ops.py": f"aotops/ops/{name}.py",
        f"{placeholder}/cases.py": f"tests/cases/{name}.py",
    }
    for source, home in homes.items():
        text = (
            (_TEMPLATES / template / source)
            .read_text()
            .replace("from aotops import operator", "from ..op import operator")
        )
        text = text.partition("\n\nCASES = ")[0].rstrip() + "\n"
        yield root / home, _renamed(text, placeholder, name)


def _renamed(text: str, placeholder: str, name: str) -> str:
    """The text with the name in each of its forms: scale, Scale, aot_scale_cpu, but not in rescaled."""
    for old, new in ((placeholder, name), (_camel(placeholder), _camel(name))):
        text = re.sub(rf"(?<![A-Za-z]){old}(?![a-z])|(?<=lib){old}(?![a-z])", new, text)
    return text


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))
