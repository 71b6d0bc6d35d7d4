"""Send this scalein to the executors of a session: for clusters whose Pythons have its dependencies, but not itself.

The package is Python only, so a zip of its files is all of it; Spark puts it in front of what an executor has
installed. llvmlite, numpy, pyarrow and pandas are machine code and must be there already.
"""

from __future__ import annotations

import hashlib
import py_compile
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import scalein
from scalein.spark.errors import in_our_words

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def ship(spark: SparkSession) -> str:
    """Send this scalein to every executor, those that come later too, and give the zip's name.

    Call it before the first flow: a Python worker that has imported another scalein keeps that one until it ends.
    """
    path = packed(Path(tempfile.mkdtemp(prefix="scalein-")))
    with in_our_words():
        spark.addArtifacts(str(path), pyfile=True)
    return path.name


def packed(folder: Path) -> Path:
    """A zip of the package in `folder`; the same files give the same name.

    It has bytecode beside the source: Python never keeps what it compiled from a zip, so each worker process would
    compile all of it again, for half a second. Executors run the driver's version of Python, or Spark refuses them.
    """
    root = Path(scalein.__file__).parent
    files = {f"scalein/{path.relative_to(root)}": path.read_bytes() for path in sorted(root.rglob("*.py"))}
    digest = hashlib.sha256(b"\0".join(name.encode() + b"\0" + text for name, text in files.items())).hexdigest()
    path = folder / f"scalein-{scalein.__version__}-{digest[:12]}.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in files.items():
            file.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)
            compiled = py_compile.compile(str(root.parent / name), str(folder / "one.pyc"), dfile=f"{path.name}/{name}",
                                          doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
            file.write(str(compiled), f"{name}c")
    (folder / "one.pyc").unlink()
    return path
