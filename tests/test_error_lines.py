"""`at` of errors and the lines of warnings: always the user's line, whatever called scalein for them.

Each case is a program of its own. The error or warning it ends with names the line marked `# here`.
"""

from __future__ import annotations

import sys
import textwrap
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scalein import ScaleinError
from scalein.jobs import driver

HEAD = """
import asyncio, contextlib, dataclasses, functools, itertools, os, threading, warnings
from concurrent.futures import ThreadPoolExecutor
import pyarrow as pa
import scalein as si
from scalein import col
from scalein.testing import Stream, until
table = pa.table({"x": [1, 2, 0], "s": ["a", "b", "c"]})
flow = si.from_arrow(table)
def in_thread(fn):
    found = []
    def run():
        try:
            fn()
        except BaseException as error:
            found.append(error)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    raise found[0]
"""

ERRORS = {
    "plain": "flow.filter('y')  # here",
    "decorator": """
        def traced(fn):
            @functools.wraps(fn)
            def call(*args):
                return fn(*args)
            return call
        @traced
        def build(name):
            return flow.select(name)  # here
        build("y")""",
    "generator": """
        def steps():
            yield flow.select("x")
            yield flow.select("y")  # here
        list(steps())""",
    "a generator of context": """
        @contextlib.contextmanager
        def opened():
            yield flow.select("y")  # here
        with opened():
            pass""",
    "inside a context": """
        with contextlib.suppress(KeyError):
            flow.select("y")  # here""",
    "an exit stack": """
        with contextlib.ExitStack() as stack:
            stack.callback(flow.select, "x")
            flow.select("y")  # here""",
    "an exit stack's callback": """
        stack = contextlib.ExitStack()
        stack.callback(flow.select, "y")
        stack.close()  # here""",
    "partial": """
        build = functools.partial(flow.select, "y")
        build()  # here""",
    "partial method": """
        class Report:
            def make(self, name):
                return flow.select(name)  # here
            wrong = functools.partialmethod(make, "y")
        Report().wrong()""",
    "cached property": """
        class Report:
            @functools.cached_property
            def rows(self):
                return flow.select("y")  # here
        Report().rows""",
    "reduce": "functools.reduce(lambda f, name: f.select(name), ['x', 'y'], flow)  # here",
    "map": "list(map(flow.select, ['x', 'y']))  # here",
    "starmap": "list(itertools.starmap(flow.select, [('y',)]))  # here",
    "sorted": "sorted([1, 2], key=lambda name: flow.select('y'))  # here",
    "a field of a dataclass": """
        @dataclasses.dataclass
        class Config:
            rows: object = dataclasses.field(default_factory=functools.partial(flow.select, "y"))
        Config()  # here""",
    "eval": "eval(\"flow.select('y')\")",  # a line of `<string>`: see the test
    "thread": """
        def work():
            flow.select("y")  # here
        in_thread(work)""",
    "pool": """
        def work():
            flow.select("y")  # here
        with ThreadPoolExecutor(1) as pool:
            pool.submit(work).result()""",
    "a method in a pool": """
        q = flow.select("x")  # here
        with ThreadPoolExecutor(1) as pool:
            pool.submit(q.filter, "y").result()""",
    "collect in a pool": """
        q = si.flow({"x": int})  # here
        with ThreadPoolExecutor(1) as pool:
            pool.submit(q.collect).result()""",
    "collect in asyncio": """
        q = flow.select(y=10 // col("x"))  # here
        asyncio.run(asyncio.to_thread(q.collect))""",
    "a task of asyncio": """
        async def work():
            return flow.select("y")  # here
        asyncio.run(work())""",
    "a row": "flow.select(y=10 // col('x')).collect()  # here",
    "an implicit cast": """
        times = pa.table({"s": pa.array([2**62], pa.timestamp("s")), "n": pa.array([1], pa.timestamp("ns"))})
        later = col("s") > col("n")  # here
        q = si.from_arrow(times).filter(later)
        q.collect()""",
    "an implicit cast of a key": """
        times = pa.table({"s": pa.array([2**62], pa.timestamp("s"))})
        q = si.from_arrow(times).join(pa.table({"s": pa.array([1], pa.timestamp("ns"))}), on="s")  # here
        q.collect()""",
    "a row, in batches": """
        q = flow.select(y=10 // col("x"))  # here
        for batch in q.batches():
            pass""",
    "a source in a thread of its own": """
        class Source:
            schema = pa.schema({"x": pa.int64()})
            def partitions(self):
                return ["a"]
            def read(self, partition, offset):
                raise KeyError("gone")
        q = si.from_source(Source())  # here
        q.start(sink=si.to_memory()).wait()""",
    "a missing file in a job": """
        os.mkdir("in")
        q = si.read_csv("in", follow=True, schema={"x": int})  # here
        with open("in/a.csv", "w") as file:
            file.write("y\\n1\\n")
        q.start(sink=si.to_memory()).wait()""",
    "a truncated file": """
        with pa.OSFile("a.arrow", "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        q = si.read_ipc("a.arrow")  # here
        open("a.arrow", "r+b").truncate(100)
        q.collect()""",
    "a sink": """
        def wrong(batch):
            raise KeyError("gone")
        flow.start(sink=si.to_callback(wrong)).wait()  # here""",
    "a row of a job": """
        flow.select(y=10 // col("x")).start(sink=si.to_memory()).wait()  # here""",
    "a job's folder": """
        open("file", "w").close()
        flow.start(sink=si.to_memory(), checkpoint="file/inside").wait()  # here""",
    "a late row": """
        source = Stream({"a": [pa.record_batch({"t": [t]}) for t in (1, 100, 2)]})
        q = si.from_source(source).with_watermark("t", 0).group_by(si.tumbling("t", 10)).agg(n=si.count())
        q.start(sink=si.to_memory(), late="error").wait()  # here""",
    "an epoch that cannot be published": """
        class Sink(type(si.to_memory())):
            def prepare(self):
                raise OSError("no room")
        flow.start(sink=Sink(), checkpoint="c").wait()  # here""",
    "a savepoint": """
        job = flow.start(sink=si.to_memory(), checkpoint="c")
        job.wait()
        job.snapshot("a/b")  # here""",
    "a udf": """
        @si.udf
        def wrong(x: int) -> int:
            return x.foo  # here
        """,
    "a udf in plain Python": """
        @si.udf(compile=False)
        def wrong(x: int) -> int:
            raise KeyError(x)
        flow.select(y=wrong(col("x"))).collect()  # here""",
    "map_batches": """
        def wrong(batch):
            raise KeyError("x")
        q = flow.map_batches(wrong, {"x": int})  # here
        q.collect()""",
}

WARNINGS = {
    "late rows": """
        source = Stream({"a": [pa.record_batch({"t": [t]}) for t in (1, 100, 2)]})
        q = si.from_source(source).with_watermark("t", 0).group_by(si.tumbling("t", 10)).agg(n=si.count())
        q.start(sink=si.to_memory()).wait()  # here""",
    "a damaged epoch": """
        for _ in range(2):
            flow.start(sink=si.to_memory(), checkpoint="c").wait()
        path = max((os.path.join("c", name) for name in os.listdir("c") if name.startswith("epoch")))
        with open(path, "w") as file:
            file.write("no manifest")
        flow.start(sink=si.to_memory(), checkpoint="c").wait()  # here""",
    "rows after the end": """
        def start(rows):
            return si.from_arrow(pa.table({"x": list(range(rows))})).start(sink=si.to_memory(), checkpoint="c")  # here
        start(3).wait()
        start(5).wait()""",
    "a checkpoint that fails": """
        class Sink(type(si.to_memory())):
            tries = 0
            def prepare(self):
                Sink.tries += 1
            def commit(self, prepared):
                if Sink.tries == 1:
                    raise OSError("no room")
        source = Stream({"a": [pa.record_batch({"x": [k]}) for k in range(9)]}, allowed={"a": 2})
        job = si.from_source(source).start(sink=Sink(), checkpoint="c", every="20ms")  # here
        until(lambda: Sink.tries > 0, job)
        source.allow("a", 9)
        job.wait()""",
}


def program(text: str, folder: Path) -> tuple[Any, str, int]:
    """The code, its file and the marked line."""
    text = HEAD + textwrap.dedent(text)
    path = folder / "users_program.py"
    path.write_text(text)
    line = next((number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# here")), 0)
    return compile(text, str(path), "exec"), str(path), line


def run(code: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("users_program")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look for it
    exec(code, module.__dict__)


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, line = program(ERRORS[name], tmp_path)
    with pytest.raises(ScaleinError) as caught:
        run(code, monkeypatch)
    assert caught.value.facts["at"] == (f"users_program.py:{line}" if line else "<string>:1")
    assert f"  at     {caught.value.facts['at']}" in str(caught.value)


@pytest.mark.parametrize("name", WARNINGS)
def test_warnings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(driver, "MORE_S", 60.0)  # a busy machine may read late
    code, path, line = program(WARNINGS[name], tmp_path)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)  # of other tests' garbage
        run(code, monkeypatch)
    assert [(each.filename, each.lineno) for each in seen] == [(path, line)], [str(each.message) for each in seen]


@pytest.mark.parametrize("cell", ["<ipython-input-3-1a2b>", "ipykernel_12/345.py", "<stdin>", "<doctest a[0]>"])
def test_a_cell_of_a_notebook(cell: str) -> None:
    """Cells are compiled under names of their own, and run by packages that are installed."""
    shell = compile("def run(code):\n    exec(code, {})", "/venv/lib/python3.12/site-packages/IPython/shell.py", "exec")
    names: dict[str, Any] = {}
    exec(shell, names)
    text = "import scalein as si, pyarrow as pa\nsi.from_arrow(pa.table({'x': [1]})).select('y')"
    with pytest.raises(ScaleinError) as caught:
        names["run"](compile(text, cell, "exec"))
    assert caught.value.facts["at"] == f"{cell.rpartition('/')[2]}:2"


@pytest.mark.parametrize(("package", "at"), [("joblib", "me.py:2"), ("pandas", "me.py:2"), ("myapp", "call.py:2")])
def test_packages_that_call_for_others(package: str, at: str) -> None:
    """An installed application is a user's program, but a package that calls what it is given is not."""
    names: dict[str, Any] = {}
    exec(compile("def call(fn, *args):\n    return fn(*args)", f"/lib/site-packages/{package}/call.py", "exec"), names)
    text = "import scalein as si\ncall(si.flow({'x': int}).select, 'y')"
    with pytest.raises(ScaleinError) as caught:
        exec(compile(text, "/home/me/me.py", "exec"), names)
    assert caught.value.facts["at"] == at
