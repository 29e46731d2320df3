"""Writes the files of a corpus into a folder: whole ones only, and over nobody's other files."""

import os
import sys


def write(folder, contents):
    """Writes `contents`, bytes by the name of their file, into `folder`, which is made if need be.

    A file that is there with the same bytes stays. Where one has other bytes nothing is written and
    the program ends: it may be the only copy of somebody's text. Every file is written under
    another name first, so a full disk leaves none of them behind.
    """
    missing, unfinished = [], []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            path = folder / name
            if not path.exists():
                missing.append(name)
            elif not path.is_file() or path.read_bytes() != content:
                sys.exit(
                    f"error: {path} is there, and is another text: name another folder, or move it away"
                )
        for name in missing:
            unfinished.append(folder / f"{name}.{os.getpid()}.new")
            unfinished[-1].write_bytes(contents[name])
        for path, name in zip(unfinished, missing, strict=True):
            os.replace(path, folder / name)
    except OSError as error:
        for path in unfinished:
            path.unlink(missing_ok=True)
        sys.exit(f"error: cannot write into {folder}: {error}")
