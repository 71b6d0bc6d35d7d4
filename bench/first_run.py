"""A fresh process that runs W1 on a few rows and prints, as JSON, the seconds that each part of it took.

`first_s` is the first collect, from plan to result, with the modules of engine and compiler imported before: with an
empty cache it is what compiling costs, with a full one it is what a warm start costs.
"""

from __future__ import annotations

import importlib
import json

from bench.data import ad_events, campaigns
from bench.race import time_s

ENGINE = ("scalein.compiler", "scalein.exec.bounded", "scalein.exec.join_build", "pyarrow.compute")  # W1 has a join
COMPILER = ("scalein.llvm_backend.stage", "scalein.llvm_backend.jit")


def main() -> None:
    times = {
        "import_s": time_s(lambda: importlib.import_module("scalein")),
        "import_engine_s": time_s(lambda: [importlib.import_module(name) for name in ENGINE]),
        "import_compiler_s": time_s(lambda: [importlib.import_module(name) for name in COMPILER]),
    }
    from bench.bench_yahoo import views  # imports scalein, so not before the lines above

    flow = views(ad_events(1_000), campaigns(), 0)
    times["first_s"] = time_s(lambda: flow.collect(workers=1))
    times["second_s"] = time_s(lambda: flow.collect(workers=1))
    print(json.dumps(times))


if __name__ == "__main__":
    main()
