"""Every function that expressions may call, one declaration each; importing the package declares them all."""

from scalein.ir.functions import arithmetic, casts, compare, dates, hashing, internal, logic, nested, strings, udf

__all__ = ["arithmetic", "casts", "compare", "dates", "hashing", "internal", "logic", "nested", "strings", "udf"]
