"""Send this scalein to the executors of a session: for clusters whose Pythons have its dependencies, but not scalein.

The package is Python only, so a zip of its files is complete; Spark puts it in front of an executor's installed
packages. llvmlite, numpy, pyarrow and pandas contain machine code and must be installed on the executors.
"""

from __future__ import annotations

import hashlib
import py_compile
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import scalein
from scalein.spark.errors import translate_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def ship(spark: SparkSession) -> str:
    """Send this scalein to every executor, also to those that start later; gives the zip's name.

    Call it before the first flow: a Python worker that has imported another scalein uses that one until it ends.
    """
    path = build_zip(Path(tempfile.mkdtemp(prefix="scalein-")))
    with translate_errors():
        spark.addArtifacts(str(path), pyfile=True)
    return path.name


def build_zip(folder: Path) -> Path:
    """Write a zip of the package to `folder`; the same files give the same name.

    It has bytecode beside the source: Python does not cache what it compiles from a zip, so each worker process would
    compile all modules again, in half a second. Executors run the driver's version of Python, or Spark refuses them.
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
