"""Compresses a wheel again, by libdeflate, which finds an eighth less to store in machine code for GPUs than zlib does.
pip and every other reader of zip files reads the result.

    python packaging/compress_wheel.py dist/aotops-*.whl
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Any

import deflate

LEVEL = 12


class _Whole:
    """A compressor, as zipfile uses them, of a file as a whole."""

    def __init__(self, *_: Any) -> None:
        self._parts: list[bytes] = []

    def compress(self, data: bytes) -> bytes:
        self._parts.append(bytes(data))
        return b""

    def flush(self) -> bytes:
        return bytes(deflate.deflate_compress(b"".join(self._parts), LEVEL))


def compress(wheel: Path) -> None:
    """In place. Names, dates, permissions and the order of the files stay."""
    again = wheel.with_name(f"{wheel.name}.new")
    with zipfile.ZipFile(wheel) as before, zipfile.ZipFile(again, "w", zipfile.ZIP_DEFLATED) as after:
        for entry in before.infolist():
            after.writestr(entry, before.read(entry))
    with zipfile.ZipFile(again) as after:
        if (damaged := after.testzip()) is not None:
            raise SystemExit(f"compress_wheel: {damaged} does not read back")
    again.replace(wheel)


if __name__ == "__main__":
    zipfile._get_compressor = _Whole  # type: ignore[attr-defined] # zipfile has no other way to another compressor
    compress(Path(sys.argv[1]))
