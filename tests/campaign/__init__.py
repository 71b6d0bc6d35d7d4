"""The campaign: random flows on random data, compiled in many ways, against the oracle and DuckDB.

    python -m tests.campaign --seed 1 --flows 100000 --udf 5000      # a long run
    python -m tests.campaign --seed 1 --only 4711                    # one flow of it again, with its reproducer

A flow is a spec (`spec.py`): Python text in small trees, and data. The text is what is evaluated and what a
reproducer prints, so that they cannot differ.

    spec.py         Node, Step, TableSpec, FlowSpec: text of a flow, the flow itself, a reproducer
    kinds.py        types of columns, values and constants of them. A new type goes here
    takes.py        sorts of types, and types of arguments
    rules.py        every function and aggregate: what it gives, takes, and how it is written. A new one goes here
    exprs.py        random expressions of a type
    data.py         random tables of every Arrow shape
    maker.py        a flow in the making; row_steps.py, input_steps.py, group_steps.py: its steps
    flows.py        which steps there are, and how often. A new one goes here
    ways.py         CPU, workers, batches, source, safe mode, optimisation: how a flow is run
    check.py        runs a flow in its ways and says what is wrong
    shrink.py       a smaller flow that is wrong in the same manner
    udf_check.py    random Python functions (tests/udf_programs.py) against CPython
    child.py        a process that checks flows, and reports
    run.py          processes, a watchdog, progress, findings, the summary

CAMPAIGN_WITHOUT=collect,explode leaves functions, aggregates and steps out while somebody works on them.
What is not compared: which of 0.0 and -0.0 stands for a group, the last bits of sums, means, exp, log and pow, and
anything computed from those; the order of rows that have none; errors that passes remove.
"""
